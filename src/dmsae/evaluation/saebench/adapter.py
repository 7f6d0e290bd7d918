"""Our SAE as SAEBench wants one. Runs in SAEBench's environment.

The package's own classes know one threshold for all latents, or no subtraction of b_dec, and no latents that read the
raw activation. So the adapter computes nothing itself: codes and reconstructions are those of the SAE inside it.
"""

import torch
from sae_bench.custom_saes.base_sae import BaseSAE
from torch import Tensor, nn

from dmsae.errors import CheckpointError
from dmsae.sae.config import SAEConfig
from dmsae.sae.sae import SAE

_NORM_TOLERANCE = 1e-4


class Adapter(BaseSAE):  # type: ignore[misc]  # the package has no types here
    """A `BaseSAE` around one of our SAEs.

    `W_enc` [D, K] and `b_enc` [K] are for measures of weights: with them, `(x − b_dec) W_enc + b_enc` are the
    pre-activations of all latents, detectors included.
    """

    def __init__(
        self,
        sae: SAE,
        model_name: str,
        layer: int,
        device: torch.device,
        dtype: torch.dtype = torch.float32,
        prepend_bos: bool = True,
        null_kind: str = "",
    ) -> None:
        config = sae.config
        require_unit_rows(sae)
        super().__init__(config.d_model, config.width, model_name, layer, device, dtype)
        self.sae = sae.to(device=device, dtype=dtype).requires_grad_(False)
        # The same parameters, not copies: whoever moves the adapter moves the SAE.
        self.W_dec, self.b_dec = sae.W_dec, sae.b_dec
        self.W_enc = nn.Parameter(sae.W_enc.T.contiguous(), requires_grad=False)
        self.b_enc = nn.Parameter(sae.encoder_bias.clone(), requires_grad=False)
        self.cfg.architecture = f"null_{null_kind}" if null_kind else architecture(config)
        self.cfg.apply_b_dec_to_input = config.center_input
        self.cfg.prepend_bos = prepend_bos
        self.cfg.device = str(device)

    def encode(self, x: Tensor) -> Tensor:
        """Return the codes [..., K] of activations [..., D]."""
        return self.sae.encode(x)

    def decode(self, feature_acts: Tensor) -> Tensor:
        """Return the reconstruction [..., D] of codes [..., K]."""
        return self.sae.decode(feature_acts)

    def forward(self, x: Tensor) -> Tensor:
        """Return the reconstruction of activations [..., D]."""
        return self.decode(self.encode(x))


def architecture(config: SAEConfig) -> str:
    """Return what the package's plots call this kind of SAE: one of its own kinds, or ours by its core."""
    if config.core is not None:
        return f"dmsae_{config.core.kind}"
    return "matryoshka_batch_topk" if len(config.prefixes) > 1 else "batch_topk"


def require_unit_rows(sae: SAE) -> None:
    """Raise unless all decoder rows have unit norm: evals compare activations of different latents."""
    off_K = (sae.W_dec.double().norm(dim=1) - 1).abs() > _NORM_TOLERANCE
    if off_K.any():
        raise CheckpointError(
            f"{int(off_K.sum())} of {len(off_K)} decoder rows do not have unit norm (first: latent "
            f"{int(off_K.nonzero()[0])}). SAEBench needs rows of unit norm; the SAE may have diverged."
        )
