"""x is what the model computes at the hook, g is the derivative of its loss there, and nothing more is computed."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

from conftest import build_model, build_tokenizer
from dmsae.activations.base_model import BaseModel, ModelConfig, identify, load_tokenizer, position_limit
from dmsae.activations.identity import ModelIdentity
from dmsae.errors import GradientError, ModelError
from dmsae.text.tokens import PAD

pytestmark = pytest.mark.usefixtures("one_thread")
TOKENS = torch.randint(3, 63, (3, 10), generator=torch.Generator().manual_seed(0), dtype=torch.int32)


def config(path: Path, **settings: Any) -> ModelConfig:
    return ModelConfig(**{"name": str(path), "hook": 0, "device": "cpu", **settings})


def wrap(model: nn.Module, hook: str = "model.layers.0") -> BaseModel:
    return BaseModel(model, build_tokenizer(), ModelIdentity("", "", "", "", hook, "float64"))


def double_model() -> nn.Module:
    """The tiny model in float64 throughout: transformers' own norm rounds to float32, which finite differences see."""
    model = build_model().double()
    for name, module in list(model.named_modules()):
        if name.endswith("norm"):
            plain = nn.RMSNorm(16, eps=module.variance_epsilon, dtype=torch.float64)
            plain.load_state_dict(module.state_dict())
            model.set_submodule(name, plain)
    return model


def summed_loss(model: Any, hook: str, tokens_NL: Tensor, edit_NLD: Tensor, counted_NL: Tensor | None = None) -> float:
    """The summed next-token loss with `edit_NLD` added at the hook: an independent way to the same number."""

    def add(_module: nn.Module, _inputs: Any, output: Any) -> Any:
        return (output[0] + edit_NLD, *output[1:]) if isinstance(output, tuple) else output + edit_NLD

    handle = model.get_submodule(hook).register_forward_hook(add)
    with torch.no_grad():
        logits = model(input_ids=tokens_NL.long().clamp(min=0), use_cache=False).logits[:, :-1].double()
    handle.remove()
    targets = tokens_NL[:, 1:].long()
    chosen = logits.log_softmax(-1).gather(-1, targets.clamp(min=0)[..., None])[..., 0]
    counted = targets != PAD if counted_NL is None else (targets != PAD) & counted_NL[:, :-1]
    return float(-(chosen * counted).sum())


@pytest.mark.parametrize("hook", ["model.layers.0", "model.layers.1", "model.layers.0.mlp", "model.embed_tokens"])
def test_gradient_agrees_with_finite_differences(hook: str) -> None:
    model = double_model()
    tokens = TOKENS.clone()
    tokens[2, 6:] = PAD
    ours = wrap(model, hook).gradients(tokens)
    step = 1e-5
    for seed in range(8):
        direction = torch.randn(ours.x_NLD.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        up, down = (summed_loss(model, hook, tokens, sign * step * direction) for sign in (1, -1))
        assert float((ours.g_NLD * direction).sum()) == pytest.approx((up - down) / (2 * step), rel=1e-5, abs=1e-5)
    assert float(ours.loss_NL.sum()) == pytest.approx(summed_loss(model, hook, tokens, torch.zeros(())), rel=1e-6)
    assert not ours.loss_NL[:, -1].any()
    assert not ours.loss_NL[2, 5:].any()


def test_losses_that_are_not_counted_have_no_influence_on_the_gradient() -> None:
    model, hook = double_model(), "model.layers.0"
    counted = torch.rand(TOKENS.shape, generator=torch.Generator().manual_seed(1)) < 0.6
    ours = wrap(model, hook).gradients(TOKENS, counted)
    step = 1e-5
    for seed in range(8):
        direction = torch.randn(ours.x_NLD.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        up, down = (summed_loss(model, hook, TOKENS, sign * step * direction, counted) for sign in (1, -1))
        assert float((ours.g_NLD * direction).sum()) == pytest.approx((up - down) / (2 * step), rel=1e-5, abs=1e-5)
    every = wrap(model, hook).gradients(TOKENS)
    assert not torch.allclose(ours.g_NLD, every.g_NLD)
    assert torch.equal(ours.loss_NL, every.loss_NL * counted)
    assert torch.equal(wrap(model, hook).losses(TOKENS, counted_NL=counted), ours.loss_NL)
    assert torch.equal(wrap(model, hook).losses(TOKENS, lambda x: x, counted), ours.loss_NL)


def test_contexts_without_any_counted_loss_have_a_gradient_of_zero() -> None:
    ours = wrap(build_model()).gradients(TOKENS, torch.zeros(TOKENS.shape, dtype=torch.bool))
    assert not ours.g_NLD.any()


@pytest.mark.real
def test_gradient_agrees_with_finite_differences_on_the_real_model(real_model: BaseModel) -> None:
    text = "The tower was built in 1889 by a company that specialised in metal frameworks and bridges."
    tokens = torch.tensor([real_model.tokenizer(text).input_ids], dtype=torch.int32)
    ours = real_model.gradients(tokens)
    assert 1 < float(ours.loss_NL.sum()) / (tokens.shape[1] - 1) < 5
    hook, generator = real_model.identity.hook, torch.Generator().manual_seed(0)
    # Random directions hardly move the loss; the gradient's own neighbourhood moves it well above float32 rounding.
    # Position 0 holds an attention sink a hundred times larger than the rest, and is never used.
    unit = ours.g_NLD / ours.g_NLD.norm()
    unit[:, 0] = 0
    for _ in range(3):
        noise = torch.randn(unit.shape, generator=generator)
        noise[:, 0] = 0
        direction = unit + 0.5 * noise / noise.norm()
        step = 0.3
        up, down = (summed_loss(real_model.model, hook, tokens, sign * step * direction) for sign in (1, -1))
        assert float((ours.g_NLD * direction).sum()) == pytest.approx((up - down) / (2 * step), rel=0.02)


@pytest.mark.parametrize("layer", [0, 1])
def test_x_is_the_hidden_state_after_the_block(layer: int, tiny_model: Path) -> None:
    model = BaseModel.load(config(tiny_model, hook=layer))
    states: list[Tensor] = []
    handle = model.model.get_submodule(f"model.layers.{layer}").register_forward_hook(
        lambda _module, _inputs, output: states.append(output)
    )
    with torch.no_grad():
        out = model.model(input_ids=TOKENS.long(), output_hidden_states=True)
    handle.remove()
    # transformers puts the final norm into the last entry; the block's own output is what is meant.
    expected = out.hidden_states[layer + 1] if layer == 0 else states[0]
    assert torch.equal(model.activations(TOKENS), expected)
    assert torch.equal(model.gradients(TOKENS).x_NLD, expected)


@pytest.mark.real
def test_x_is_the_hidden_state_of_the_real_model(real_model: BaseModel) -> None:
    tokens = torch.tensor([real_model.tokenizer("A short text, to look at.").input_ids])
    with torch.no_grad():
        expected = real_model.model(input_ids=tokens, output_hidden_states=True).hidden_states[9]
    assert torch.equal(real_model.activations(tokens), expected)


def test_padding_changes_nothing_before_it(tiny_model: Path) -> None:
    model = BaseModel.load(config(tiny_model))
    padded = torch.cat([TOKENS[:, :6], torch.full((3, 4), PAD)], dim=1)
    torch.testing.assert_close(model.activations(padded)[:, :6], model.activations(TOKENS[:, :6]))
    whole, cut = model.gradients(padded), model.gradients(TOKENS[:, :6])
    torch.testing.assert_close(whole.g_NLD[:, :6], cut.g_NLD)
    assert not whole.g_NLD[:, 6:].any()


def test_forward_stops_at_the_hook(tiny_model: Path) -> None:
    model = BaseModel.load(config(tiny_model))
    called: list[str] = []
    for name in ("model.layers.0", "model.layers.1", "model.norm", "lm_head"):
        model.model.get_submodule(name).register_forward_pre_hook(lambda *_, name=name: called.append(name))
    model.activations(TOKENS)
    assert called == ["model.layers.0"]
    model.gradients(TOKENS)
    assert called[1:] == ["model.layers.0", "model.layers.1", "model.norm", "lm_head"]


def test_blocks_below_the_hook_build_no_graph(tiny_model: Path) -> None:
    model = BaseModel.load(config(tiny_model, hook=1))
    graphs: dict[str, bool] = {}

    def note(name: str) -> Any:
        return lambda _module, _inputs, output: graphs.update({name: output.requires_grad})

    for name in ("model.embed_tokens", "model.layers.0", "model.norm"):
        model.model.get_submodule(name).register_forward_hook(note(name))
    ours = model.gradients(TOKENS)
    assert graphs == {"model.embed_tokens": False, "model.layers.0": False, "model.norm": True}
    assert not any(tensor.requires_grad for tensor in ours)
    assert all(parameter.grad is None for parameter in model.model.parameters())


def test_nothing_is_left_hooked_after_an_error(tiny_model: Path) -> None:
    model = BaseModel.load(config(tiny_model))
    before = model.activations(TOKENS)
    with pytest.raises(IndexError):
        model.gradients(torch.full((1, 4), 10_000))
    assert not model.model.get_submodule("model.layers.0")._forward_hooks
    assert torch.equal(model.activations(TOKENS), before)


class Detached(nn.Module):
    """A block that breaks the chain to the loss in a chosen way."""

    def __init__(self, block: nn.Module, change: Any) -> None:
        super().__init__()
        self.block, self.change = block, change

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.change(self.block(*args, **kwargs))


class Poison(torch.autograd.Function):
    """Passes values on and returns a gradient that is not a number."""

    @staticmethod
    def forward(_context: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(_context: Any, g: Tensor) -> Tensor:
        return g * torch.nan


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda x: x.detach(), r"does not depend on 'model\.layers\.0'; choose another"),
        (lambda x: x * 0, r"gradient at 'model\.layers\.0' is zero everywhere"),
        (Poison.apply, r"gradient at 'model\.layers\.0' is not finite"),
    ],
)
def test_useless_gradients_are_errors(change: Any, message: str) -> None:
    model = build_model()
    model.model.layers[1] = Detached(model.model.layers[1], change)
    with pytest.raises(GradientError, match=message):
        wrap(model).gradients(TOKENS)


@pytest.mark.parametrize(
    ("hook", "error"),
    [("model.rotary_emb", "hidden states"), ("model", "hidden states"), ("model.layers", "never reached")],
)
def test_hooks_without_hidden_states_are_refused(hook: str, error: str) -> None:
    with pytest.raises(ModelError, match=error):
        wrap(build_model(), hook).activations(TOKENS)


def test_a_module_that_runs_twice_is_refused() -> None:
    model = build_model()
    model.model.layers[1] = model.model.layers[0]
    with pytest.raises(ModelError, match="runs more than once"):
        wrap(model).gradients(TOKENS)


def test_layer_number_and_path_are_the_same_hook(tiny_model: Path) -> None:
    identities = [identify(config(tiny_model, hook=hook)) for hook in (1, "1", "model.layers.1")]
    assert identities[0] == identities[1] == identities[2]
    assert identities[0].hook == "model.layers.1"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"name": "smolm2-135m"}, r"Unknown model 'smolm2-135m'.*Did you mean 'smollm2-135m'"),
        ({"name": "probes"}, r"'probes' is a corpus; it must be a model"),
        ({"name": "/no/such/directory"}, r"Unknown model '/no/such/directory': no such directory, and not a Hub id"),
        ({"name": "./model"}, r"Unknown model '\./model': no such directory"),
        ({"name": "models/of/mine"}, r"Unknown model 'models/of/mine': no such directory"),
        ({"hook": 2}, r"model\.hook = 2; it must be a layer of the model in .*, from 0 to 1"),
        ({"hook": -1}, r"model\.hook = -1; it must be a layer"),
        ({"hook": "-1"}, r"model\.hook = -1; it must be a layer"),
        ({"hook": "model.layer.1"}, r"'model\.layer\.1'; it must be a module.*Did you mean 'model\.layers\.1'"),
        ({"hook": "model.layers.0.mpl"}, r"Did you mean 'model\.layers\.0\.mlp'"),
    ],
)
def test_unknown_names_offer_the_nearest(settings: dict[str, Any], message: str, tiny_model: Path) -> None:
    with pytest.raises(ModelError, match=message):
        identify(config(tiny_model, **settings))


@pytest.mark.parametrize(
    ("family", "settings", "limit"),
    [
        ("GPT2", {"n_positions": 8, "n_layer": 1, "n_head": 1, "n_embd": 8}, 8),
        ("Llama", {"max_position_embeddings": 32}, 32),
        ("Bloom", {"n_layer": 1}, None),
    ],
)
def test_the_position_limit_is_what_the_model_states(
    family: str, settings: dict[str, Any], limit: int | None, tmp_path: Path
) -> None:
    getattr(transformers, f"{family}Config")(**settings).save_pretrained(tmp_path)
    assert position_limit(config(tmp_path)) == limit


def test_device_that_does_not_exist_is_refused(tiny_model: Path) -> None:
    for device in ("cuda:99", "no-such-device"):
        with pytest.raises(ModelError, match=f"device = '{device}' cannot be used"):
            BaseModel.load(config(tiny_model, device=device))


@pytest.fixture
def copied(tiny_model: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_model, tmp_path / "copy"))


def test_identity_sees_weights_config_and_tokenizer_but_not_the_place(tiny_model: Path, copied: Path) -> None:
    first, second = identify(config(tiny_model)), identify(config(copied))
    assert (first.weights_sha256, first.tokenizer_sha256) == (second.weights_sha256, second.tokenizer_sha256)
    build_model(seed=1).save_pretrained(copied)
    assert identify(config(copied)).weights_sha256 != first.weights_sha256
    assert identify(config(copied)).tokenizer_sha256 == first.tokenizer_sha256
    seen = {first.tokenizer_sha256}
    for name in ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "spiece.model"):
        (copied / name).write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
        assert identify(config(copied)).tokenizer_sha256 not in seen, f"{name} counts"
        seen.add(identify(config(copied)).tokenizer_sha256)


def test_broken_model_directories_are_named(copied: Path) -> None:
    identity = identify(config(copied))
    weights = copied / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(ModelError, match=r"copy holds a model that cannot be loaded"):
        BaseModel.load(config(copied), identity)
    weights.unlink()
    with pytest.raises(ModelError, match=r"copy holds no \.safetensors weights"):
        identify(config(copied))
    (copied / "config.json").write_text('{"model_type": "no-such-architecture"}')
    build_model().save_pretrained(copied / "elsewhere")
    shutil.copy(copied / "elsewhere" / "model.safetensors", weights)
    with pytest.raises(ModelError, match=r"not a causal language model that transformers knows"):
        identify(config(copied))
    (copied / "config.json").unlink()
    with pytest.raises(ModelError, match=r"no config\.json"):
        identify(config(copied))


def test_weights_that_are_missing_are_never_made_up(copied: Path) -> None:
    model = build_model()
    state = {name: tensor for name, tensor in model.state_dict().items() if "layers.1.mlp" not in name}
    model.save_pretrained(copied, state_dict=state)
    with pytest.raises(ModelError, match=r"incomplete: 3 are missing, among them model\.layers\.1\.mlp"):
        BaseModel.load(config(copied))


def test_a_directory_without_tokenizer_is_named(tmp_path: Path) -> None:
    build_model().save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="holds no tokenizer"):
        load_tokenizer(config(tmp_path))


def test_dtype_is_the_models_own_arithmetic(tiny_model: Path) -> None:
    model = BaseModel.load(config(tiny_model, dtype="bfloat16"))
    assert model.activations(TOKENS).dtype == torch.bfloat16
    losses = model.gradients(TOKENS).loss_NL
    reference = BaseModel.load(config(tiny_model)).gradients(TOKENS).loss_NL
    assert losses.dtype == torch.float32
    assert F.l1_loss(losses, reference) < 0.2


def test_no_code_of_a_model_directory_runs_and_nobody_is_asked(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, marker = Path(shutil.copytree(tiny_model, tmp_path / "model")), tmp_path / "ran"
    code = f"import os\nos.mkdir({str(marker)!r})\nMine = object\n"
    classes = {"AutoConfig": "code.Mine", "AutoModelForCausalLM": "code.Mine", "AutoTokenizer": ["code.Mine", None]}
    (path / "code.py").write_text(code)
    for name in ("config.json", "tokenizer_config.json"):
        facts = json.loads((path / name).read_text()) | {"auto_map": classes, "model_type": "mine"}
        facts |= {"tokenizer_class": "Mine"}
        (path / name).write_text(json.dumps(facts))
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    uses: list[Callable[[ModelConfig], Any]] = [identify, position_limit, load_tokenizer, BaseModel.load]
    for use in uses:
        with pytest.raises(ModelError, match=str(path)):
            use(config(path))
        assert not marker.exists()


@pytest.mark.parametrize(
    "changes",
    [
        {"hidden_size": -4},
        {"hidden_size": "16"},
        {"hidden_size": 0},
        {"num_attention_heads": 0},
        {"num_attention_heads": None},
        {"num_hidden_layers": 0},
        {"num_hidden_layers": 10**9},
        {"num_hidden_layers": "2"},
        {"vocab_size": -1},
        {"hidden_act": "none such"},
        {"rope_scaling": {"rope_type": "none such"}},
        {"model_type": 3},
    ],
)
def test_damaged_model_directories_are_named(tiny_model: Path, tmp_path: Path, changes: dict[str, Any]) -> None:
    path = edited(tiny_model, tmp_path / "model", changes)
    with pytest.raises(ModelError, match=re.escape(str(path))):
        BaseModel.load(config(path))


@pytest.mark.parametrize(
    "changes",
    [{"rope_theta": "x"}, {"architectures": 3}, {"quantization_config": {"quant_method": "none such"}}],
)
def test_edits_that_transformers_ignores_change_nothing(
    tiny_model: Path, tmp_path: Path, changes: dict[str, Any]
) -> None:
    damaged = BaseModel.load(config(edited(tiny_model, tmp_path / "model", changes)))
    assert torch.equal(damaged.activations(TOKENS), BaseModel.load(config(tiny_model)).activations(TOKENS))


def edited(model: Path, path: Path, changes: dict[str, Any]) -> Path:
    """Copy a model directory, and change its config."""
    shutil.copytree(model, path)
    facts = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(facts | changes))
    return path
