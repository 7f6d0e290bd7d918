"""Predictions before and after an intervention, compared with the same written out."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import log_softmax

from dictionaries import random_sae
from dmsae.activations.base_model import BaseModel, ModelConfig
from dmsae.errors import ConfigError, ModelError
from dmsae.interventions.intervention import Intervention
from dmsae.interventions.reading import read
from dmsae.interventions.steering import steer
from dmsae.sae.config import SAEConfig
from dmsae.sae.sae import SAE

pytestmark = pytest.mark.usefixtures("one_thread")
TEXT = "w3 w14 w15 w9 w26 w5"
CLAMP = [Intervention(4, "clamp", 30.0)]


@pytest.fixture(scope="module")
def model(tiny_model: Path) -> BaseModel:
    return BaseModel.load(ModelConfig(name=str(tiny_model), hook=0, device="cpu"))


@pytest.fixture(scope="module")
def sae() -> SAE:
    return random_sae(SAEConfig(16, 32, 4, (8, 32)), threshold=0.3)


def clamped(model: BaseModel, sae: SAE, tokens: Tensor) -> Tensor:
    """Return the logits after the last of these tokens when latent 4 is 30, its change added to x."""
    keep = model.keep_mask(tokens)[..., None]

    def edit(x: Tensor) -> Tensor:
        return x + keep * (30 - sae.encode(x)[..., 4:5]) * sae.W_dec[4]

    return model.logits(tokens, edit)[0, -1]


def test_distributions_are_those_of_the_run_written_out(model: BaseModel, sae: SAE) -> None:
    steered = steer(sae, model, TEXT, CLAMP, n_top=3)
    tokens = torch.tensor([model.tokenizer(TEXT).input_ids])
    log_p, log_q = (log_softmax(one, -1) for one in (model.logits(tokens)[0, -1], clamped(model, sae, tokens)))
    assert torch.allclose(steered.before_V, log_p.exp(), atol=1e-6)
    assert torch.allclose(steered.after_V, log_q.exp(), atol=1e-5)
    assert steered.kl == pytest.approx(float((log_p.exp() * (log_p - log_q)).sum()), rel=1e-3)
    assert steered.kl > 0.1
    expected = set(log_p.topk(3).indices.tolist()) | set(log_q.topk(3).indices.tolist())
    assert {one.token for one in steered.top} == expected
    larger = [max(one.before, one.after) for one in steered.top]
    assert larger == sorted(larger, reverse=True)
    for one in steered.top:
        assert (one.before, one.after) == (float(steered.before_V[one.token]), float(steered.after_V[one.token]))
        assert one.text == model.tokenizer.convert_ids_to_tokens(one.token)
    assert steered.reading.latents == (4,)
    assert (steered.continued_before, steered.continued_after) == ("", "")


def test_a_greedy_continuation_takes_the_most_probable_token_each_time(model: BaseModel, sae: SAE) -> None:
    steered = steer(sae, model, TEXT, CLAMP, n_tokens=8)
    written = []
    for is_clamped in (False, True):
        tokens = torch.tensor([model.tokenizer(TEXT).input_ids])
        for _ in range(8):
            logits = clamped(model, sae, tokens) if is_clamped else model.logits(tokens)[0, -1]
            if int(logits.argmax()) == model.tokenizer.eos_token_id:
                break
            tokens = torch.cat([tokens, logits.argmax()[None, None]], 1)
        written.append(model.tokenizer.decode(tokens[0, 6:].tolist()))
    assert [steered.continued_before, steered.continued_after] == written
    assert written[0] != written[1]


def test_what_is_drawn_depends_on_the_seed_alone(model: BaseModel, sae: SAE) -> None:
    def drawn(seed: int) -> tuple[str, str]:
        steered = steer(sae, model, TEXT, [Intervention(4, "scale", 1.0)], n_tokens=6, temperature=1.0, seed=seed)
        assert steered.kl == 0
        return steered.continued_before, steered.continued_after

    assert drawn(0) == drawn(0)
    assert drawn(0)[0] == drawn(0)[1], "the same draws before and after: nothing but the change differs"
    assert len({drawn(seed)[0] for seed in range(4)}) > 1


def test_a_continuation_ends_before_the_end_of_text(
    model: BaseModel, sae: SAE, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = steer(sae, model, TEXT, CLAMP, n_tokens=5).continued_after.split()
    last = next(word for word in whole[1:] if word not in whole[:1])
    monkeypatch.setattr(model.tokenizer, "_special_tokens_map", {"eos_token": last})
    assert steer(sae, model, TEXT, CLAMP, n_tokens=5).continued_after.split() == whole[: whole.index(last)]


def test_the_reconstruction_can_take_the_place_of_x(model: BaseModel, sae: SAE) -> None:
    nothing = [Intervention(4, "scale", 1.0)]
    tokens = torch.tensor([model.tokenizer(TEXT).input_ids])
    keep = model.keep_mask(tokens)[..., None]
    replaced = model.logits(tokens, lambda x: torch.where(keep, sae(x), x))[0, -1].softmax(-1)
    assert torch.allclose(steer(sae, model, TEXT, nothing, keep_error=False).after_V, replaced, atol=1e-5)
    assert steer(sae, model, TEXT, nothing, keep_error=False).kl > 0


def test_bad_input_is_refused(model: BaseModel, sae: SAE) -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({"interventions": []}, "No intervention was given"),
        ({"interventions": [Intervention(99, "ablate")]}, r"latents = \[99\]"),
        ({"n_tokens": -1}, "n_tokens = -1"),
        ({"n_tokens": 59}, "The text has 6 tokens and 59 are to follow; the model has 64 positions"),
        ({"n_top": 0}, "n_top = 0"),
        ({"temperature": -0.5}, "temperature = -0.5"),
        ({"temperature": float("nan")}, "temperature = nan"),
        ({"text": ""}, "none that an SAE is applied to"),
    ]
    for settings, message in cases:
        with pytest.raises(ConfigError, match=message):
            steer(sae, model, **{"text": TEXT, "interventions": CLAMP} | settings)
    strongest = read(sae, model, TEXT).latents[0]
    with pytest.raises(ModelError, match="not finite with these interventions"):
        steer(sae, model, TEXT, [Intervention(strongest, "scale", 3e38)])
