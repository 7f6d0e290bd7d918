"""What a store is made from: the settings of a harvest, and the request that is written into the store.

The request holds all that the content depends on, and the store's key is its hash. Names and places are recorded but
do not count: the same weights and the same text under another name give the same store.
"""

from dataclasses import dataclass, field, replace
from pathlib import Path

from dmsae.activations.base_model import ModelConfig
from dmsae.activations.dtypes import DtypeName
from dmsae.activations.identity import ModelIdentity
from dmsae.activations.journal import FORMAT, read_json, remedy
from dmsae.activations.splits import Split
from dmsae.config import Json, from_dict, require, require_whole, to_dict
from dmsae.disk import layout
from dmsae.disk.files import canonical_hash
from dmsae.errors import ConfigError, StoreError, first_line
from dmsae.text.corpus import TextConfig
from dmsae.text.tokens import TokenConfig

_PAIRS_SHARE = 8
"""How many times smaller the shards of pairs are."""


@dataclass(frozen=True, slots=True)
class HarvestConfig:
    """What a store is made from, and how.

    >>> dmsae.HarvestConfig(train_tokens=2_000_000).text.source
    'probes'
    """

    model: ModelConfig = field(default_factory=ModelConfig)
    text: TextConfig = field(default_factory=TextConfig)
    tokens: TokenConfig = field(default_factory=TokenConfig)
    train_tokens: int = 1_000_000
    """Activations to train on. Masked positions do not count; norm outliers do, and are then left out."""
    heldout_tokens: int = 50_000
    """Activations of held-out documents."""
    pair_tokens: int = 20_000
    """(x, g) pairs for attribution. Each costs a forward and a backward pass through the whole model."""
    max_contexts_per_document: int = 4
    """Of one document, pairs and held-out text take at most this many contexts' worth of tokens, in one stretch that
    starts at random: they should come from many documents. Training text is not limited."""
    skip_boundary_targets: bool = True
    """Leave losses on special tokens and on the first token of a document out of the sum whose gradient is g."""
    dtype: DtypeName = "float16"
    """How x is stored. Values that do not fit are an error, never infinity."""
    gradient_dtype: DtypeName = "float32"
    """How g is stored. Gradients are small: 16 bits may lose them."""
    shard_tokens: int = 65_536
    """Positions per file, before dropping. An interrupted harvest loses the file that it was making. Files of pairs,
    which are far more expensive, hold an eighth as many."""
    max_norm_ratio: float | None = 10.0
    """Drop activations whose norm exceeds this multiple of the median norm in their shard. None: keep all."""
    batch_contexts: int = 8
    """Contexts per forward pass. Does not change what is stored, beyond rounding."""
    seed: int = 0
    """Decides the order of documents and of activations."""

    def __post_init__(self) -> None:
        for name in ("train_tokens", "heldout_tokens", "pair_tokens"):
            require_whole(name, getattr(self, name), 0)
        total = self.train_tokens + self.heldout_tokens + self.pair_tokens
        require(total > 0, "train_tokens + heldout_tokens + pair_tokens", total, "be at least 1")
        require_whole("max_contexts_per_document", self.max_contexts_per_document, 1)
        require_whole("batch_contexts", self.batch_contexts, 1)
        require_whole("shard_tokens", self.shard_tokens, 1)
        length = self.tokens.context_length
        require(self.shard_tokens >= length, "shard_tokens", self.shard_tokens, f"hold a context of {length} tokens")
        ratio = self.max_norm_ratio
        require(ratio is None or ratio > 1, "max_norm_ratio", ratio, "be above 1, or None")

    def wanted(self, split: Split) -> int:
        """Return how many activations of a split are asked for."""
        return _wanted(self, split)

    def shard_contexts(self, split: Split) -> int:
        """Return how many contexts a shard of a split is made from."""
        share = _PAIRS_SHARE if split is Split.PAIRS else 1
        return max(1, self.shard_tokens // self.tokens.context_length // share)


@dataclass(frozen=True, slots=True)
class HarvestRequest:
    """What a harvested store is made from."""

    format: int
    source: str
    """Name of the text."""
    model: ModelIdentity
    text: Json
    """Identity of the corpus, and how its documents are told apart, split and shuffled."""
    tokens: TokenConfig
    train_tokens: int
    heldout_tokens: int
    pair_tokens: int
    max_contexts_per_document: int
    skip_boundary_targets: bool
    shard_tokens: int
    dtype: DtypeName
    gradient_dtype: DtypeName
    max_norm_ratio: float | None
    seed: int

    @classmethod
    def of(cls, config: HarvestConfig, model: ModelIdentity, corpus: Json) -> "HarvestRequest":
        """Return the request that settings make of a model and a corpus, both given by their identity."""
        text = to_dict(config.text)
        how = {name: text[name] for name in ("txt_documents", "heldout_fraction", "pairs_fraction", "shuffle_chars")}
        return cls(
            format=FORMAT,
            source=config.text.source,
            model=model,
            text=corpus | how,
            tokens=config.tokens,
            train_tokens=config.train_tokens,
            heldout_tokens=config.heldout_tokens,
            pair_tokens=config.pair_tokens,
            max_contexts_per_document=config.max_contexts_per_document,
            skip_boundary_targets=config.skip_boundary_targets,
            shard_tokens=config.shard_tokens,
            dtype=config.dtype,
            gradient_dtype=config.gradient_dtype,
            max_norm_ratio=config.max_norm_ratio,
            seed=config.seed,
        )

    @property
    def key(self) -> str:
        """The store's name."""
        return _key(self)

    def wanted(self, split: Split) -> int:
        """Return how many activations of a split were asked for."""
        return _wanted(self, split)


@dataclass(frozen=True, slots=True)
class ImportRequest:
    """What a store of imported activations is made from."""

    source: str
    """Where the training activations came from."""
    model: ModelIdentity
    content_sha256: str
    """Hash of all shards."""
    shard_rows: int
    dtype: DtypeName
    seed: int
    format: int = FORMAT

    @property
    def key(self) -> str:
        """The store's name."""
        return _key(self)


StoreRequest = HarvestRequest | ImportRequest
"""What a store is made from, as `request.json` holds it."""


def read_request(store: Path) -> StoreRequest:
    """Return what a store is made from."""
    values = read_json(store / layout.STORE_REQUEST)
    try:
        if "content_sha256" in values:
            return from_dict(ImportRequest, values)
        return from_dict(HarvestRequest, values)
    except ConfigError as error:
        raise StoreError(
            f"{store / layout.STORE_REQUEST} is not a request that this version of dmsae reads: {first_line(error)}. "
            f"{remedy(store)}"
        ) from error


def _wanted(harvest: HarvestConfig | HarvestRequest, split: Split) -> int:
    return {
        Split.PAIRS: harvest.pair_tokens,
        Split.HELDOUT: harvest.heldout_tokens,
        Split.TRAIN: harvest.train_tokens,
    }[split]


def _key(request: StoreRequest) -> str:
    nameless = replace(request, source="", model=replace(request.model, name="", revision=""))
    return canonical_hash(to_dict(nameless))[:16]
