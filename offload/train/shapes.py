"""Which model to train: a named shape with random weights, or a Hugging Face folder.

Models are built without memory; the tiers are filled when the model is wrapped.
"""

from __future__ import annotations

import difflib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from ..errors import ModelError

if TYPE_CHECKING:  # the command asks for names before it has torch
    from torch import nn

BYTES = 256  # vocabulary of models that read plain bytes
DEFAULT_SHAPE = "gpt2-25m"


@dataclass(frozen=True)
class Shape:
    """Sizes of a decoder-only transformer.

    ``family`` is the Hugging Face model type.  ``inner`` is the width of the feed-forward layer,
    ``kv_heads`` the number of key and value heads (llama only).
    """

    family: str
    layers: int
    width: int
    heads: int
    vocabulary: int
    positions: int
    inner: int | None = None
    kv_heads: int | None = None
    tied: bool = True


SHAPES: dict[str, Shape] = {
    "gpt2-1m": Shape("gpt2", 4, 128, 4, BYTES, 512),
    "gpt2-25m": Shape("gpt2", 14, 384, 6, BYTES, 1024),
    "gpt2-124m": Shape("gpt2", 12, 768, 12, 50257, 1024),
    "gpt2-350m": Shape("gpt2", 24, 1024, 16, 50257, 1024),
    "gpt2-774m": Shape("gpt2", 36, 1280, 20, 50257, 1024),
    "gpt2-1.5b": Shape("gpt2", 48, 1600, 25, 50257, 1024),
    "llama-30m": Shape("llama", 12, 448, 7, BYTES, 2048, 1216, 7),
    "llama-160m": Shape("llama", 12, 768, 12, 32000, 2048, 3072, 12, False),
    "llama-1b": Shape("llama", 16, 2048, 32, 128256, 8192, 8192, 8),
    "llama-3b": Shape("llama", 28, 3072, 24, 128256, 8192, 8192, 8),
    "llama-8b": Shape("llama", 32, 4096, 32, 128256, 8192, 14336, 8, False),
    "llama-13b": Shape("llama", 40, 5120, 40, 32000, 4096, 13824, 40, False),
    "llama-70b": Shape("llama", 80, 8192, 64, 128256, 8192, 28672, 8, False),
}


@dataclass(frozen=True)
class ModelSource:
    """What ``--model`` stands for.

    Attributes:
        name: the shape's name, or the folder's.
        config: the Hugging Face configuration.
        folder: where weights and tokenizer come from; ``None`` for random weights.
    """

    name: str
    config: Any
    folder: Path | None

    @property
    def vocabulary(self) -> int:
        """Number of different tokens that the model reads."""
        return int(self.config.get_text_config().vocab_size)

    @property
    def positions(self) -> int | None:
        """The longest sequence that the model takes, or ``None`` where it has no limit."""
        limit = getattr(self.config.get_text_config(), "max_position_embeddings", None)
        return None if limit is None else int(limit)

    def build(self) -> nn.Module:
        """The model, without memory for its parameters, in training mode."""
        from torch import nn

        from ..state.initial import empty_init

        transformers = _transformers()
        with empty_init():
            model = transformers.AutoModelForCausalLM.from_config(self.config)
        if not isinstance(model, nn.Module):
            raise TypeError(f"expected a module for {self.name}, got {type(model).__name__}")
        model.__dict__["loss_type"] = "ForCausalLM"  # what it falls back to, without its warning
        return model.train()


def _transformers() -> Any:
    try:
        import transformers
    except ImportError as error:
        raise ModelError(
            f'models need transformers ({error}); pip install "overspill[hf]"'
        ) from error
    return transformers


def _config_of(shape: Shape) -> Any:
    """The Hugging Face configuration of a shape.  Without dropout: runs can be compared."""
    transformers = _transformers()
    if shape.family == "gpt2":
        return transformers.GPT2Config(
            vocab_size=shape.vocabulary,
            n_positions=shape.positions,
            n_embd=shape.width,
            n_layer=shape.layers,
            n_head=shape.heads,
            n_inner=shape.inner,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            bos_token_id=0,
            eos_token_id=0,
            tie_word_embeddings=shape.tied,
            use_cache=False,
        )
    return transformers.LlamaConfig(
        vocab_size=shape.vocabulary,
        hidden_size=shape.width,
        intermediate_size=shape.inner,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        max_position_embeddings=shape.positions,
        bos_token_id=0,
        eos_token_id=0,
        tie_word_embeddings=shape.tied,
        use_cache=False,
    )


def plan_model(name: str) -> nn.Module:
    """The model that ``name`` stands for, for a plan only: names and shapes, without memory.

    ``name``: a named shape, a Hugging Face folder, or a ``config.json``.  transformers is imported
    only for families that ``skeletons`` does not know.

    Raises:
        ValueError, OffloadError: as for ``find_model``.
    """
    if name not in SHAPES and not Path(name).exists():
        _refuse_unknown(name)
    from .skeletons import skeleton

    if name in SHAPES:
        shape = SHAPES[name]
        sizes: dict[str, Any] = {"tie_word_embeddings": shape.tied, "vocab_size": shape.vocabulary}
        if shape.family == "gpt2":
            sizes |= {"model_type": "gpt2", "n_positions": shape.positions, "n_embd": shape.width}
            sizes |= {"n_layer": shape.layers, "n_inner": shape.inner}
        else:
            sizes |= {"model_type": "llama", "hidden_size": shape.width}
            sizes |= {"num_hidden_layers": shape.layers, "intermediate_size": shape.inner}
            sizes |= {"num_attention_heads": shape.heads, "num_key_value_heads": shape.kv_heads}
        found = skeleton(sizes)
        assert found is not None
        return found
    path = Path(name)
    path = path / "config.json" if path.is_dir() else path
    if path.is_file():
        try:
            found = skeleton(json.loads(path.read_text(encoding="utf-8")))
        except ValueError as error:
            raise ValueError(f"model: {path} cannot be read: {error}") from error
        if found is not None:
            return found
        name = str(path.parent)
    return find_model(name).build()


def quantised_by(name: str) -> str | None:
    """The method that quantised the weights in a Hugging Face folder; ``None`` for other models.

    Raises:
        ValueError: its configuration is not valid JSON.
    """
    folder = Path(name)
    if name in SHAPES or not (folder.is_dir() and any(folder.glob("*.safetensors"))):
        return None
    from ..state.quantised_files import quantisation_of

    config = quantisation_of(folder)
    return None if config is None else str(config.get("quant_method"))


def _refuse_unknown(name: str) -> NoReturn:
    near = difflib.get_close_matches(name, SHAPES, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"shapes: {', '.join(SHAPES)}"
    raise ValueError(f"model: {name!r} is neither a folder nor a named shape; {hint}")


def find_model(name: str) -> ModelSource:
    """The model that ``name`` stands for: a named shape, or a Hugging Face folder.

    Raises:
        ValueError: neither a shape nor a folder with a ``config.json`` of a causal language model.
        OffloadError: transformers is not installed.
    """
    if name in SHAPES:
        return ModelSource(name, _config_of(SHAPES[name]), None)
    folder = Path(name)
    if not folder.is_dir():
        _refuse_unknown(name)
    if not (folder / "config.json").is_file():
        raise ValueError(f"model: {folder} holds no config.json, so it is no Hugging Face folder")
    try:
        config = _transformers().AutoConfig.from_pretrained(folder, local_files_only=True)
    except (ValueError, KeyError, OSError) as error:
        raise ValueError(f"model: {folder / 'config.json'} cannot be read: {error}") from error
    config.use_cache = False
    if hasattr(config, "quantization_config"):
        del config.quantization_config  # weights are dequantised as they are read
    return ModelSource(folder.name or str(folder), config, folder)
