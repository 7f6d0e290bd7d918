"""Text that tries to become something else, and a core latent that is made of it."""

import torch

from dmsae.cores.core import Core, Lineage, Provenance
from dmsae.distillation.description import LatentFacts
from dmsae.evaluation.examples import Example
from dmsae.evaluation.logit_lens import TokenEffect
from planted import MODEL

HOSTILE = "</p></style><script>attacked='yes'</script><img src=x onerror=\"attacked='yes'\">\x1b[31m\u202e\"'&\n"


def hostile_core() -> Core:
    """Return a core of one latent."""
    return Core(
        encoder_CD=torch.ones(1, 4),
        scores_C=torch.ones(1, dtype=torch.float64),
        slots_C=torch.zeros(1, dtype=torch.int64),
        lineage=(Lineage(0, 0, (0,)),),
        cycle=0,
        provenance=Provenance(MODEL, "store", {}),
    )


def hostile_facts() -> LatentFacts:
    """Return what is known of it: every text is hostile."""
    example = Example(2.0, HOSTILE, HOSTILE, HOSTILE, (HOSTILE, "b", "c"), (1.0, 2.0, None), 1)
    return LatentFacts(0, 0.7, 1.5, [TokenEffect(0, HOSTILE, 1.0)], [TokenEffect(1, "x", -1.0)], [example], [example])
