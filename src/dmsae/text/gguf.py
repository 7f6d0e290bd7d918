"""The bundled model comes as a GGUF file. It is converted once, to a directory that transformers loads offline."""

import io
import warnings
from contextlib import redirect_stderr
from pathlib import Path
from typing import Any


def convert_gguf(gguf: Path, target: Path) -> None:
    """Write the model and tokenizer of a GGUF file as a Hugging Face directory, in float32."""
    import torch
    import transformers

    # transformers draws several progress bars on stderr, and not all of them have a switch.
    with warnings.catch_warnings(), redirect_stderr(io.StringIO()):
        warnings.simplefilter("ignore")
        tokenizer = transformers.AutoTokenizer.from_pretrained(
            gguf.parent, gguf_file=gguf.name, trust_remote_code=False
        )
        model: Any = transformers.AutoModelForCausalLM.from_pretrained(
            gguf.parent, gguf_file=gguf.name, dtype=torch.float32, trust_remote_code=False
        )
        # transformers still calls the model quantised after dequantising it, and would refuse to save it.
        del model.config.quantization_config
        model.hf_quantizer = None
        model.save_pretrained(target)
        tokenizer.save_pretrained(target)
