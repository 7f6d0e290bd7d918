"""The process that runs one eval of SAEBench, in SAEBench's environment: `python -m … job.json`.

Standard output carries events, one JSON object a line. Everything that the package prints goes to standard error, which
the process that started this one keeps as a log.
"""

import os
import re
import shutil
import sys
import time
import traceback
from pathlib import Path
from typing import IO, Any

from dmsae.config import Json
from dmsae.disk import layout
from dmsae.disk.files import exclusive_lock, write_json
from dmsae.errors import BenchmarkError, DmsaeError, first_line
from dmsae.evaluation.saebench.job import Event, Job, JobSAE
from dmsae.evaluation.saebench.results import is_kept

_SECONDS_BETWEEN_EVENTS = 1.0
_BAR = re.compile(r"([^\r\n:|]*?):?\s*\d+%\|[^|]*\| *([\d.]+\w*/[\d.]+\w*)[^\r\n|]*$")
"""A progress bar as tqdm draws it: what it is about, and how much of how much is done."""


class Events:
    """What is said to the process that started this one."""

    def __init__(self, channel: IO[str]) -> None:
        self._channel = channel
        self._last = 0.0

    def say(self, event: Event) -> None:
        """Say something at once; when nobody listens any more, nobody wants the work either."""
        try:
            self._channel.write(event.line())
            self._channel.flush()
        except BrokenPipeError:
            os._exit(1)

    def now_and_then(self, text: str) -> None:
        """Say how far the work is, unless that was said a moment ago."""
        if time.monotonic() - self._last > _SECONDS_BETWEEN_EVENTS:
            self._last = time.monotonic()
            self.say(Event("progress", text=text))


class Tee:
    """Standard error, from which bars are passed on as progress: that is where the package draws them."""

    def __init__(self, stream: IO[str], events: Events) -> None:
        self._stream, self._events = stream, events

    def write(self, text: str) -> int:
        """Write, and pass on how far the last bar is."""
        if bar := _BAR.search(text):
            self._events.now_and_then(" ".join(part for part in bar.groups() if part))
        return self._stream.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def main(arguments: list[str]) -> int:
    """Run the job in a file, and return the exit status."""
    events = take_standard_output()
    try:
        job = Job.read(Path(arguments[0]))
        with exclusive_lock(job.cache / job.eval / layout.LOCK, f"What {job.eval} shares between SAEs"):
            Worker(job, events).run()
    except DmsaeError as error:
        events.say(Event("refused", text=str(error)))
        return 2
    return 0


def take_standard_output() -> Events:
    """Keep standard output for events, and send everything else that is printed to standard error."""
    events = Events(os.fdopen(os.dup(1), "w", encoding="utf8"))
    os.dup2(2, 1)
    sys.stderr = Tee(sys.stderr, events)
    return events


class Worker:
    """One eval, SAE after SAE."""

    def __init__(self, job: Job, events: Events) -> None:
        from dmsae.evaluation.saebench import lens, package  # SAEBench takes a while to import

        package.require_settings(job)
        self.job, self._events = job, events
        self._model_name = lens.register(job.model)
        self._versions = package.versions()
        self._unfinished = job.out / layout.UNFINISHED

    def run(self) -> None:
        """Evaluate the SAEs one after the other; one that fails does not stop the others."""
        from dmsae.evaluation.saebench.calls import BELOW_HOOK
        from dmsae.evaluation.saebench.lens import from_directory, loaded_once
        from dmsae.evaluation.saebench.needs import missing

        self._events.say(Event("ready", text=f"SAEBench {self._versions['sae-bench']}"))
        lacking = missing(self.job, self._model_name)
        shutil.rmtree(self._unfinished, ignore_errors=True)  # a killed worker may have left it torn
        n_layers = self.job.model.layer + 1 if self.job.eval in BELOW_HOOK else None
        with from_directory(self.job.model), loaded_once(n_layers):
            for sae in self.job.saes:
                if is_kept(self.job, sae):
                    self._events.say(Event("kept", sae.name))
                elif lacking:
                    self._events.say(Event("not run", sae.name, lacking))
                else:
                    self._events.say(self._attempt(sae))
        shutil.rmtree(self._unfinished, ignore_errors=True)

    def _attempt(self, sae: JobSAE) -> Event:
        """Evaluate an SAE, and return how that ended."""
        self._events.say(Event("start", sae.name, sae.name))
        began = time.monotonic()
        try:
            self._evaluate(sae, began)
        except Exception as error:  # the package raises anything
            traceback.print_exc()
            what = str(error) if isinstance(error, DmsaeError) else f"{type(error).__name__}: {first_line(error)}."
            return Event("failed", sae.name, what, time.monotonic() - began)
        return Event("done", sae.name, seconds=time.monotonic() - began)

    def _evaluate(self, sae: JobSAE, began: float) -> None:
        from dmsae.evaluation.saebench.calls import CALLS, seed_everything

        job = self.job
        own = job.cache / job.eval / "saes" / job.key(sae)[:16]
        if job.how.force:
            shutil.rmtree(own, ignore_errors=True)
        scratch = self._unfinished / job.eval / sae.name
        shutil.rmtree(scratch, ignore_errors=True)
        (scratch / "result").mkdir(parents=True)
        self._enter(scratch / "workplace")
        seed_everything(job.how.seed)
        figures = CALLS[job.eval](self._prepared(sae, scratch / "result", own))
        self._keep(sae, scratch / "result", {"figures": figures, "seconds": time.monotonic() - began})

    def _prepared(self, sae: JobSAE, scratch: Path, own: Path) -> Any:
        import torch

        from dmsae.devices import model_device
        from dmsae.evaluation.saebench.adapter import Adapter
        from dmsae.evaluation.saebench.calls import Call
        from dmsae.sae.sae import SAE

        job = self.job
        dtype: torch.dtype = getattr(torch, job.how.dtype)
        loaded, device = SAE.load(sae.directory), model_device(job.how.device)
        where = (self._model_name, job.model.layer, device, dtype)
        adapter = Adapter(loaded, *where, job.how.prepend_bos, sae.null_kind)
        return Call(job, sae.name, adapter, self._model_name, scratch, own)

    def _enter(self, workplace: Path) -> None:
        """Make a directory the current one: the package looks there for data sets, and leaves things there."""
        workplace.mkdir()
        for owner in self.job.how.data.iterdir() if self.job.how.data else ():
            if owner.is_dir():
                (workplace / owner.name).symlink_to(owner.absolute(), target_is_directory=True)
        os.chdir(workplace)

    def _keep(self, sae: JobSAE, scratch: Path, facts: Json) -> None:
        """Check the result, and move it to where it belongs; its record is written last."""
        from dmsae.evaluation.saebench.package import require_valid

        found = list(scratch.rglob("*_eval_results.json"))
        if len(found) != 1:
            raise BenchmarkError(f"The package left {len(found)} results; expected one. The log says why.")
        require_valid(self.job.eval, found[0])
        record, target = self.job.record(sae), self.job.result(sae)
        record.unlink(missing_ok=True)
        target.parent.mkdir(parents=True, exist_ok=True)
        found[0].replace(target)
        made_from = {"key": self.job.key(sae), "digest": sae.digest, "settings": self.job.settings}
        write_json(record, {**made_from, **facts, "versions": self._versions})


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
