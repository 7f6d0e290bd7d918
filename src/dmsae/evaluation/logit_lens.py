"""Which next tokens a latent promotes and suppresses: its decoder row, read through the model's unembedding.

What a latent writes into the residual stream reaches the logits through the final norm and the unembedding:
`W_U · (gain ⊙ row)`, the row centred first if the norm is a LayerNorm. That is the direct path alone, an approximation:
the blocks after the hook read what was written too, and the norm's divisor, which depends on the token, is taken as 1.
The further below the last block the hook is, the less it says. (The logit lens: nostalgebraist, "interpreting GPT: the
logit lens", 2020; on the decoder rows of SAEs: Bloom & Lin, "Understanding SAE Features with the Logit Lens", 2024.)
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from dmsae.activations.base_model import BaseModel
from dmsae.config import require_whole
from dmsae.errors import ModelError
from dmsae.seeds import generator
from dmsae.text.token_text import token_texts

_ELEMENTS = 2**24
"""Logits held at once; those of all latents for a large vocabulary do not fit into memory."""
_TOKENS_AT_ONCE = 8192
"""Rows of the unembedding that are converted to float32 at once."""
_PROBE_SCALE = 64.0
"""Large beside the ε of any norm, exact in every dtype."""


class TokenEffect(NamedTuple):
    """What a latent does to one token's logit."""

    token_id: int
    token: str
    """Its text."""
    logit: float
    """Change of the logit for each unit of activation, less the mean over all tokens; the norm divides by 1."""


class TokenEffects(NamedTuple):
    """The tokens that a latent promotes most and suppresses most, the strongest first."""

    promoted: list[TokenEffect]
    suppressed: list[TokenEffect]


class FinalNorm(NamedTuple):
    """What is left of a norm when its divisor is taken as 1."""

    gain_D: Tensor
    """The factor of each dimension."""
    centres: bool
    """Whether the mean over dimensions is subtracted first, as in a LayerNorm."""

    def __call__(self, rows_CD: Tensor) -> Tensor:
        """Return rows in float32 as the norm passes them on."""
        rows_CD = rows_CD.to(self.gain_D)
        return self.gain_D * (rows_CD - rows_CD.mean(1, keepdim=True) if self.centres else rows_CD)


@torch.no_grad()
def promoted_tokens(decoder_CD: Tensor, model: BaseModel, n: int = 5) -> list[TokenEffects]:
    """Return, for each decoder row, the n tokens whose logits it raises most and the n that it lowers most.

    Only tokens of the tokenizer's vocabulary count; an unembedding often has rows beyond it. A model whose last step
    before the unembedding is not a LayerNorm or RMSNorm is a `ModelError`.
    """
    require_whole("n", n, 1)
    head = _unembedding(model)
    n_rows, d_model = head.weight.shape
    if decoder_CD.shape[1] != d_model:
        raise ModelError(
            f"The decoder rows have width {decoder_CD.shape[1]}, but the unembedding of {model.identity.name} takes "
            f"{d_model}: only what is written into the residual stream can be read as tokens."
        )
    norm = final_norm(model)
    tokens_V = torch.tensor(sorted({i for i in model.tokenizer.get_vocab().values() if i < n_rows}))
    n = min(n, len(tokens_V))
    effects = []
    for rows_CD in norm(decoder_CD.to(model.device)).split(max(1, _ELEMENTS // len(tokens_V))):
        parts = (head.weight[part.to(model.device)].float() for part in tokens_V.split(_TOKENS_AT_ONCE))
        logits_CV = torch.cat([rows_CD @ part_VD.T for part_VD in parts], dim=1)
        logits_CV -= logits_CV.mean(1, keepdim=True)
        sides = [(*(values.cpu() for values in logits_CV.topk(n, largest=largest)),) for largest in (True, False)]
        for row in range(len(rows_CD)):
            lists = (_effects(values[row], tokens_V[at[row]], model.tokenizer) for values, at in sides)
            effects.append(TokenEffects(*lists))
    return effects


def _effects(logits_n: Tensor, tokens_n: Tensor, tokenizer: Any) -> list[TokenEffect]:
    tokens = tokens_n.tolist()
    return [TokenEffect(*one) for one in zip(tokens, token_texts(tokenizer, tokens), logits_n.tolist(), strict=True)]


def _unembedding(model: BaseModel) -> nn.Linear:
    whole: Any = model.model
    head = whole.get_output_embeddings()
    if not isinstance(head, nn.Linear) or not head.weight.is_floating_point():
        kind = type(head).__name__
        raise ModelError(f"The unembedding of {model.identity.name} is a {kind}; it must be a linear map to read it.")
    return head


@torch.no_grad()
def final_norm(model: BaseModel) -> FinalNorm:
    """Return the norm before the unembedding: the module whose output the unembedding reads, whatever its name."""
    name = _last_module(model)
    if not name:
        raise ModelError(
            f"The final norm of {model.identity.name} cannot be found: what its unembedding reads is not the output "
            "of any module of the model."
        )
    module = model.model.get_submodule(name)
    norm = _linearised(module, _unembedding(model).weight[:1])
    if norm is None:
        raise ModelError(
            f"The final norm of {model.identity.name} cannot be found: the module before its unembedding, {name} "
            f"({type(module).__name__}), is neither a LayerNorm nor an RMSNorm."
        )
    return norm


def _last_module(model: BaseModel) -> str:
    """Return the path of the module whose output the unembedding reads, or '' when there is none."""
    head = _unembedding(model)
    read: list[Tensor] = []
    made: list[tuple[str, Any]] = []

    def remember(name: str, module: nn.Module) -> Any:
        return module.register_forward_hook(lambda _module, _inputs, output: made.append((name, output)))

    leaves = [(name, m) for name, m in model.model.named_modules() if m is not head and not any(m.children())]
    handles = [remember(name, module) for name, module in leaves]
    handles.append(head.register_forward_pre_hook(lambda _module, inputs: read.append(inputs[0])))
    try:
        model.losses(torch.tensor([[0, 1]]))
    finally:
        for handle in handles:
            handle.remove()
    # The first to have this output made it; a dropout after it only hands it on.
    same = (name for name, output in made if isinstance(output, Tensor) and read and torch.equal(output, read[0]))
    return next(same, "")


def _linearised(module: nn.Module, like: Tensor) -> FinalNorm | None:
    """Return what a module does to its input beside a division, or None when it does not behave like a norm.

    The module is asked, not its weights: Gemma's norms multiply by 1 + weight, others have no weight at all.
    """
    d_model = like.shape[-1]
    v_D = torch.ones(d_model)
    v_D[1::2] = -1
    if d_model % 2:
        v_D[1] = -2  # its mean is 0, so that centring does not change it
    noise_D = 2 * torch.randn(d_model, generator=generator("final norm")) + 1
    inputs = (torch.stack([v_D, -v_D, v_D + 1, noise_D]) * _PROBE_SCALE).to(like)
    plus, minus, shifted, actual = module(inputs[None])[0].float()
    v_D, noise_D = inputs[0].float(), inputs[3].float()
    gain_D, bias_D = (plus - minus) / 2 * _rms(v_D) / v_D, (plus + minus) / 2
    tolerance = max(1e-3, 16 * torch.finfo(like.dtype).eps) * float((plus - minus).abs().max())
    centres = bool((shifted - plus).abs().max() <= tolerance)
    x_D = noise_D - noise_D.mean() if centres else noise_D
    expected = gain_D * x_D / _rms(x_D) + bias_D
    return FinalNorm(gain_D, centres) if bool((actual - expected).abs().max() <= tolerance) else None


def _rms(x_D: Tensor) -> Tensor:
    return x_D.square().mean().sqrt()
