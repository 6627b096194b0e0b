"""Which boundaries SGLang captures for a draft's layer ids: by the class of the target, and by version.

Every served class that has `set_eagle3_layers_to_capture`, as `bench/oracles/setters_sglang.py` finds and runs them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from spectrace.replay.profiles.profile import Capture

__all__ = ["OF_0_5_9", "OF_0_5_12", "OF_0_5_23"]


def _left(ids: Sequence[int], _layers: int) -> list[int]:
    """Ids of the layers that streams leave."""
    return [i + 1 for i in ids]


def _left_if_first_is_1(ids: Sequence[int], layers: int) -> Sequence[int]:
    """DeepSeek's classes since #25454: drafts of both conventions are about, and the first id is to tell."""
    return _left(ids, layers) if ids and ids[0] == 1 else ids


def _entered_if_greatest_is_last(ids: Sequence[int], layers: int) -> Sequence[int]:
    """GPT-OSS since #32334."""
    return ids if ids and max(ids) == layers else _left(ids, layers)


def _later_default(layers: int) -> tuple[int, ...]:
    return (3, layers // 2 + 1, layers - 2)


_USUAL = Capture(_left, last=False)
_NO_EMBEDDING = replace(_USUAL, embedding=False)
_FLAGS = replace(_USUAL, fails_beyond=True)
_TO_THE_LAST = Capture(_left)
_GUESSED = Capture(_left_if_first_is_1, last=False)

_LLAMAS = (
    "ApertusForCausalLM", "ExaoneMoEForCausalLM", "Glm4MoeForCausalLM", "IQuestCoderForCausalLM",
    "InternLM3ForCausalLM", "Llama4ForCausalLM", "Llama4ForConditionalGeneration", "LlamaForCausalLM",
    "LongcatFlashForCausalLM",
    "Ministral3ForCausalLM", "MistralForCausalLM", "Phi3ForCausalLM", "TeleFLMForCausalLM",
)  # fmt: skip
_DEEPSEEKS = (
    "DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM", "DeepseekV32ForCausalLM", "Glm4MoeLiteForCausalLM",
    "GlmMoeDsaForCausalLM", "MistralLarge3ForCausalLM",
)  # fmt: skip
_QWENS = (
    "BailingMoEForCausalLM", "BailingMoeForCausalLM", "BailingMoeV2ForCausalLM", "Qwen2ForCausalLM",
    "Qwen2_5_VLForConditionalGeneration", "Qwen3ForCausalLM",
)  # fmt: skip
_EXPERTS = ("Qwen2MoeForCausalLM", "Qwen3MoeForCausalLM", "Qwen3NextForCausalLM")
_KIMI, _GPT_OSS, _MINIMAX = "KimiK25ForConditionalGeneration", "GptOssForCausalLM", "MiniMaxM2ForCausalLM"
_GEMMAS = (
    "Gemma3ForCausalLM", "Gemma3ForConditionalGeneration", "Gemma4ForCausalLM", "Gemma4ForConditionalGeneration",
)  # fmt: skip
_VISIONS = (
    "Qwen3VLForConditionalGeneration",
    "Qwen3VLMoeForConditionalGeneration",
    "InternS1ProForConditionalGeneration",
)

OF_0_5_9: Mapping[str, Capture] = {
    **dict.fromkeys((*_LLAMAS, *_DEEPSEEKS, _GPT_OSS, _MINIMAX), _NO_EMBEDDING),
    **dict.fromkeys(_QWENS, _USUAL),
    **dict.fromkeys(_EXPERTS, replace(_FLAGS, adds_default=True)),  # flags of its graphs' default are never cleared
}
OF_0_5_12: Mapping[str, Capture] = {
    **dict.fromkeys((*_LLAMAS, *_DEEPSEEKS, _GPT_OSS, _KIMI), _NO_EMBEDDING),
    **dict.fromkeys((*_QWENS, *_VISIONS, _MINIMAX, "SarvamMoEForCausalLM"), _USUAL),
    **dict.fromkeys(_EXPERTS, _FLAGS),
    **dict.fromkeys(_GEMMAS, _TO_THE_LAST),
}
OF_0_5_23: Mapping[str, Capture] = {
    **dict.fromkeys((*_LLAMAS, *_QWENS, _MINIMAX, _VISIONS[0], "SarvamMoEForCausalLM"), _USUAL),
    **dict.fromkeys(
        ("Cosmos3ForConditionalGeneration", "ExaoneMoeForCausalLM", "Glm5NextForConditionalGeneration"), _USUAL
    ),
    **dict.fromkeys((*_DEEPSEEKS, _KIMI), _GUESSED),
    **dict.fromkeys((*_GEMMAS, "Gemma4UnifiedForConditionalGeneration", "MiniMaxM3SparseForCausalLM"), _TO_THE_LAST),
    **dict.fromkeys(
        (
            *_EXPERTS, *_VISIONS[1:], "InternS2MobiusForConditionalGeneration",
            "InternS2PreviewForConditionalGeneration", "MellumForCausalLM", "Qwen3_5ForConditionalGeneration",
            "Qwen3_5MoeForConditionalGeneration",
            "Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM",
        ),
        _FLAGS,
    ),
    _GPT_OSS: Capture(_entered_if_greatest_is_last),
    "MiniMaxM3SparseForConditionalGeneration": replace(_TO_THE_LAST, default=_later_default),
}  # fmt: skip
