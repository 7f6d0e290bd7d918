"""SAEBench itself, the real package, on our SAEs.

It cannot share our environment, so it runs in one of its own (`make saebench-env`), as a process with a job file:

    here                                       there
    runner.py   jobs, progress, results  →     worker.py     one eval on some SAEs, one after the other
    evals.py    names, figures, settings       adapter.py    our SAE as the package wants it
    job.py      what is handed over            calls.py      how each eval is called
    nulls.py    worthless SAEs beside them     needs.py      what an eval needs and may not find
    results.py  what comes back                package.py    its settings and its schema
                                               lens.py       models through TransformerLens
"""
