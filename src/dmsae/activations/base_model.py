"""Any Hugging Face causal language model, untouched, read at one hook point: activations x and gradients g.

x is the output of the hooked module (for a layer number: the residual stream after that block); g is the derivative of
the summed next-token cross-entropy with respect to x, on the clean model (the paper's g_u). Which losses are summed is
for the caller to say.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dmsae.activations.dtypes import DtypeName, torch_dtype
from dmsae.activations.head import Head
from dmsae.activations.identity import ModelIdentity
from dmsae.devices import model_device
from dmsae.disk.files import canonical_hash, sha256_of, user_path
from dmsae.errors import GradientError, ModelError, first_line, nearest
from dmsae.progress import SILENT, Progress
from dmsae.text import assets
from dmsae.text.hub import download
from dmsae.text.tokens import PAD, KeepMask

_MOST_LAYERS = 1000


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Which model, and where in it.

    >>> dmsae.ModelConfig(name="google/gemma-2-2b", hook=12).dtype
    'float32'
    """

    name: str = "smollm2-135m"
    """A bundled model (see `dmsae assets list`; smollm2-135m is SmolLM2-135M-Instruct with 4-bit weights), a local
    Hugging Face directory, or a Hub id as `owner/name`."""
    revision: str = ""
    """Of a Hub model: branch, tag or commit. Empty: the default branch, resolved to its commit."""
    hook: int | str = 8
    """A layer number (the residual stream after that block, counted from 0) or a dotted module path."""
    dtype: DtypeName = "float32"
    """The arithmetic that the model runs in. On CPUs without bfloat16 units, anything but float32 is slower."""
    device: str = "auto"
    """`cpu`, `cuda`, `cuda:1`, `mps`, or `auto`: the first of cuda, mps and cpu that exists."""


class LossGradient(NamedTuple):
    """Activations, the gradient of the summed next-token loss at them, and the loss per position (0 if not counted)."""

    x_NLD: Tensor
    g_NLD: Tensor
    loss_NL: Tensor


class _Reached(Exception):
    """Raised by the hook to end a forward pass once x is known."""


def locate(config: ModelConfig, progress: Progress = SILENT) -> tuple[Path, str]:
    """Return the directory that holds the model, fetched if necessary, and its revision ('' when it has none)."""
    if config.name in assets.ASSETS:
        asset = assets.find(config.name)
        if asset.kind != "model":
            raise ModelError(f"model.name = {config.name!r} is a {asset.kind}; it must be a model. Try 'smollm2-135m'.")
        return assets.fetch(config.name, progress), asset.version
    path = user_path(config.name)
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ModelError(f"{path} has no config.json: it is not a Hugging Face model directory.")
        return path, ""
    if config.name.count("/") != 1 or path.is_absolute() or config.name.startswith("."):
        bundled = [asset.name for asset in assets.ASSETS.values() if asset.kind == "model"]
        raise ModelError(
            f"Unknown model {config.name!r}: no such directory, and not a Hub id (owner/name) either. "
            f"{nearest(config.name, bundled)}"
        )
    return _download(config)


def _download(config: ModelConfig) -> tuple[Path, str]:
    patterns = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]
    path = download(config.name, patterns, ModelError, config.revision or None)
    return path, path.name


def identify(config: ModelConfig, progress: Progress = SILENT) -> ModelIdentity:
    """Return a model's identity, and check its hook point, without loading its weights."""
    path, revision = locate(config, progress)
    if config.name in assets.ASSETS:
        assets.fetch_whole(config.name, progress)
    weights = sorted(path.glob("*.safetensors"))
    if not weights:
        raise ModelError(f"{path} holds no .safetensors weights. Pickled weights are not loaded; convert them first.")
    vocabulary = [file for file in sorted(path.glob("*")) if _is_of_tokenizer(file)]
    return ModelIdentity(
        name=config.name,
        revision=revision,
        weights_sha256=canonical_hash([sha256_of(file) for file in [path / "config.json", *weights]]),
        tokenizer_sha256=canonical_hash([sha256_of(file) for file in vocabulary]),
        hook=resolve_hook(skeleton(path), config.hook, f"the model in {path}"),
        dtype=config.dtype,
    )


def position_limit(config: ModelConfig, progress: Progress = SILENT) -> int | None:
    """Return how many positions the model states that it has; None if it states no limit."""
    import transformers  # here and below: importing it takes a second, and few commands need it

    path, _ = locate(config, progress)
    with _named(path, "describes no model that transformers knows"):
        return _stated_limit(transformers.AutoConfig.from_pretrained(path, trust_remote_code=False))


def _stated_limit(config: Any) -> int | None:
    limit = getattr(config.get_text_config(), "max_position_embeddings", None)
    return limit if isinstance(limit, int) and limit > 0 else None


def _is_of_tokenizer(file: Path) -> bool:
    names = ("tokenizer", "vocab", "merges", "special_tokens_map", "added_tokens")
    return file.name.startswith(names) or file.suffix == ".model"


def resolve_hook(model: nn.Module, hook: int | str, name: str = "this model") -> str:
    """Return the dotted path of the hooked module; an unknown one is an error that offers the nearest names."""
    if isinstance(hook, str) and not hook.lstrip("-").isdigit():
        names = [name for name, _ in model.named_modules() if name]
        if hook not in names:
            raise ModelError(f"model.hook = {hook!r}; it must be a module of {name}. {nearest(hook, names)}")
        return hook
    config: Any = model.config
    n_layers = config.get_text_config().num_hidden_layers
    stacks = [name for name, m in model.named_modules() if isinstance(m, nn.ModuleList) and len(m) == n_layers]
    if not stacks:
        raise ModelError(f"The blocks of {name} cannot be located. Give model.hook as a dotted module path instead.")
    if not 0 <= int(hook) < n_layers:
        raise ModelError(f"model.hook = {hook}; it must be a layer of {name}, from 0 to {n_layers - 1}.")
    return f"{stacks[0]}.{int(hook)}"


def skeleton(path: Path) -> nn.Module:
    """Return the model's modules without weights."""
    import transformers

    with _named(path, "is not a causal language model that transformers knows"), torch.device("meta"):
        described = transformers.AutoConfig.from_pretrained(path, trust_remote_code=False)
        _require_size(path, described.get_text_config())
        model: nn.Module = transformers.AutoModelForCausalLM.from_config(described, trust_remote_code=False)
        return model


def _require_size(path: Path, described: Any) -> None:
    """Raise when a config describes so many blocks that making their modules alone would take for ever."""
    n_layers = getattr(described, "num_hidden_layers", 1)
    if not isinstance(n_layers, int) or not 1 <= n_layers <= _MOST_LAYERS:
        raise ModelError(f"{path / 'config.json'}: num_hidden_layers is {n_layers!r}; expected 1 to {_MOST_LAYERS}.")


@contextmanager
def _named(path: Path, what: str) -> Iterator[None]:
    """Turn whatever transformers raises about a model directory into an error that names it.

    `trust_remote_code=False` is passed wherever a directory is opened: no code in it runs, and nobody is asked.
    """
    try:
        yield
    except ModelError:
        raise
    except Exception as error:  # a damaged config can raise anything at all
        raise ModelError(f"{path} {what}: {type(error).__name__}: {first_line(error)}.") from error


class BaseModel:
    """A frozen causal language model with one hook point.

    >>> model = dmsae.BaseModel.load(dmsae.ModelConfig(name=str(tiny_model), hook=0))
    >>> tokens = torch.tensor([[5, 6, 7, 8]])
    >>> model.activations(tokens).shape  # x [N, L, D]
    torch.Size([1, 4, 16])
    >>> model.gradients(tokens).g_NLD.shape  # g = ∂ loss / ∂ x
    torch.Size([1, 4, 16])
    """

    def __init__(self, model: nn.Module, tokenizer: Any, identity: ModelIdentity) -> None:
        self.model = model.eval().requires_grad_(False)
        self.tokenizer = tokenizer
        self.identity = identity
        self.keep_mask = KeepMask.of(tokenizer)
        self.device = next(model.parameters()).device
        self.prepend_bos: bool | None = None
        self.max_norm_ratio: float | None = None
        self._hooked = model.get_submodule(identity.hook)
        self._head = Head(model)

    def reading(self, prepend_bos: bool | None, max_norm_ratio: float | None = None) -> "BaseModel":
        """Return the same model for prompts that begin with BOS or do not (None: as its tokenizer has it), of which
        activations longer than a multiple of their median norm do not count."""
        other = copy(self)
        other.prepend_bos, other.max_norm_ratio = prepend_bos, max_norm_ratio
        return other

    @classmethod
    def load(
        cls, config: ModelConfig, identity: ModelIdentity | None = None, progress: Progress = SILENT
    ) -> "BaseModel":
        """Load the model that `config` names onto its device."""
        import transformers

        path, _ = locate(config, progress)
        identity = identity or identify(config, progress)
        device = model_device(config.device)
        transformers.utils.logging.disable_progress_bar()
        with _named(path, "holds a model that cannot be loaded"):
            loaded: Any = transformers.AutoModelForCausalLM.from_pretrained(
                path,
                dtype=torch_dtype(config.dtype),
                use_safetensors=True,
                output_loading_info=True,
                trust_remote_code=False,
            )
        model, loading = loaded
        if missing := sorted(loading["missing_keys"]):
            raise ModelError(
                f"The weights in {path} are incomplete: {len(missing)} are missing, among them "
                f"{', '.join(missing[:3])}; transformers would have filled them with random numbers. Download the "
                "model again."
            )
        return cls(model.to(device), load_tokenizer(config, progress), identity)

    @property
    def position_limit(self) -> int | None:
        """How many positions the model states that it has; None if it states no limit."""
        return _stated_limit(self.model.config)

    @torch.no_grad()
    def activations(self, tokens_NL: Tensor) -> Tensor:
        """Return x [N, L, D]; nothing above the hook is computed."""
        captured: list[Tensor] = []

        def take(_module: nn.Module, _inputs: Any, output: Any) -> None:
            captured.append(hidden_states(output, tokens_NL))
            raise _Reached

        with self._hook(take):
            try:
                self._forward(tokens_NL)
            except _Reached:
                return captured[0]
        raise ModelError(f"The forward pass never reached the hook {self.identity.hook!r}.")

    def gradients(self, tokens_NL: Tensor, counted_NL: Tensor | None = None) -> LossGradient:
        """Return x, g and the losses that are counted (default: all); blocks below the hook build no graph."""
        self._head.prepare(self._on_device(tokens_NL))
        leaf: list[Tensor] = []

        def restart_graph(_module: nn.Module, _inputs: Any, output: Any) -> Any:
            if leaf:
                raise ModelError(
                    f"{self.identity.hook!r} runs more than once in a forward pass; choose another model.hook."
                )
            leaf.append(hidden_states(output, tokens_NL).detach().requires_grad_())
            return with_hidden_states(output, leaf[0])

        with self._hook(restart_graph), torch.enable_grad():
            losses_NL = self._next_token_losses(tokens_NL, counted_NL)
            if not leaf or not losses_NL.requires_grad:
                raise GradientError(
                    f"The next-token loss does not depend on {self.identity.hook!r}; choose another model.hook."
                )
            (g_NLD,) = torch.autograd.grad(losses_NL.sum(), leaf)
        self._check(g_NLD, losses_NL)
        return LossGradient(leaf[0].detach(), g_NLD, losses_NL.detach())

    @torch.no_grad()
    def losses(
        self,
        tokens_NL: Tensor,
        edit: Callable[[Tensor], Tensor] | None = None,
        counted_NL: Tensor | None = None,
    ) -> Tensor:
        """Return the cross-entropy [N, L] of each position's next token, with x replaced by `edit(x)` if given.

        It is 0 where there is no next token, and where `counted_NL` is false.
        """
        self._head.prepare(self._on_device(tokens_NL))
        with self._edited(tokens_NL, edit):
            return self._next_token_losses(tokens_NL, counted_NL)

    @torch.no_grad()
    def logits(self, tokens_NL: Tensor, edit: Callable[[Tensor], Tensor] | None = None) -> Tensor:
        """Return the logits [N, L, V] of each position's next token, with x replaced by `edit(x)` if given."""
        with self._edited(tokens_NL, edit):
            logits: Tensor = self._forward(tokens_NL).logits
            return logits

    @contextmanager
    def _edited(self, tokens_NL: Tensor, edit: Callable[[Tensor], Tensor] | None) -> Iterator[None]:
        def replace(_module: nn.Module, _inputs: Any, output: Any) -> Any:
            return output if edit is None else with_hidden_states(output, edit(hidden_states(output, tokens_NL)))

        with self._hook(replace):
            yield

    def _check(self, g_NLD: Tensor, losses_NL: Tensor) -> None:
        if not torch.isfinite(g_NLD).all():
            raise GradientError(
                f"The gradient at {self.identity.hook!r} is not finite with model.dtype = {self.identity.dtype}. "
                "Use float32 or bfloat16."
            )
        if losses_NL.any() and not g_NLD.any():
            raise GradientError(
                f"The gradient at {self.identity.hook!r} is zero everywhere with model.dtype = {self.identity.dtype}. "
                "Use float32, or a hook point that the loss depends on."
            )

    def _next_token_losses(self, tokens_NL: Tensor, counted_NL: Tensor | None) -> Tensor:
        """Return the cross-entropy [N, L] of each position's next token, 0 where there is none or it is not counted."""
        # The targets are shifted, not the logits: a slice of those would be copied, and its gradient again.
        targets_NL = F.pad(tokens_NL[:, 1:], (0, 1), value=PAD).to(self.device, torch.int64)
        if counted_NL is not None:
            targets_NL = targets_NL.masked_fill(~counted_NL.to(self.device), PAD)
        return self._head.losses(self._on_device(tokens_NL), targets_NL)

    def _forward(self, tokens_NL: Tensor) -> Any:
        return self.model(input_ids=self._on_device(tokens_NL), use_cache=False)

    def _on_device(self, tokens_NL: Tensor) -> Tensor:
        # Padding is only at the end of a context: a causal model's earlier positions never see it.
        return tokens_NL.to(self.device, torch.int64).clamp(min=0)

    @contextmanager
    def _hook(self, function: Any) -> Iterator[None]:
        handle = self._hooked.register_forward_hook(function)
        try:
            yield
        finally:
            handle.remove()


def load_tokenizer(config: ModelConfig, progress: Progress = SILENT) -> Any:
    """Return the model's own tokenizer."""
    import transformers

    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    path, _ = locate(config, progress)
    with _named(path, "holds no tokenizer that can be loaded"):
        return transformers.AutoTokenizer.from_pretrained(path, trust_remote_code=False)


def hidden_states(output: Any, tokens_NL: Tensor) -> Tensor:
    """Return the hidden states in a module's output, which may be a tuple."""
    main = output[0] if isinstance(output, tuple) else output
    if not isinstance(main, Tensor) or main.ndim != 3 or main.shape[:2] != tokens_NL.shape:
        raise ModelError(
            "The module at model.hook does not return hidden states [contexts, positions, width]. Give a layer "
            "number, or a module inside a block."
        )
    return main


def with_hidden_states(output: Any, replacement: Tensor) -> Any:
    """Return a module's output with other hidden states in it."""
    return (replacement, *output[1:]) if isinstance(output, tuple) else replacement
