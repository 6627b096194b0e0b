"""Our own engine: it takes every draft as its files mean it."""

from spectrace.engine.dialect import ID_KEYS
from spectrace.engine.spec import FuseNorm, Stream
from spectrace.replay.profiles.profile import Profile, Switch

__all__ = ["GENERIC", "SPECTRACE", "SWITCHES"]

_DRAFT = "spectrace.engine.draft.DraftModel"
_STEP = "spectrace.engine.draft_shard.DraftShard.step"
_CODE = {
    "capture": "spectrace.engine.target.TargetModel",
    "capture_mode": "spectrace.engine.plan.CaptureHiddenMode",
    "hand_off": "spectrace.engine.target_shard.TargetShard.step",
    "rows": _STEP,
    "tokens": "spectrace.engine.scheduler.Scheduler.apply",
    "positions": _STEP,
    "project": f"{_DRAFT}.fuse",
    "layer": f"{_DRAFT}.forward",
    "feedback": f"{_DRAFT}.forward",
    "rope": "spectrace.engine.rope.rotary_table",
    "vocabulary": f"{_DRAFT}.to_target",
    "window": "spectrace.engine.attention.Reach",
    "context": _STEP,
    "load": "spectrace.engine.checkpoint.build_draft",
    "wiring": "spectrace.engine.serving.resolve_wiring",
    "tree": "spectrace.engine.tree.Growth",
    "verify": "spectrace.engine.verify.verify_sampled",
    "ranks": "spectrace.engine.target.TargetModel",
    "draft_ranks": "spectrace.engine.parallel.split_draft",
}
SWITCHES = {
    "residual": Switch(
        "the residual", "layer",
        {Stream.PRE_NORM: {"norm_before_residual": False}, Stream.POST_NORM: {"norm_before_residual": True}},
        default=Stream.PRE_NORM,
    ),
    "feedback": Switch(
        "the state that is fed back", "feedback",
        {Stream.PRE_NORM: {"norm_output": False}, Stream.POST_NORM: {"norm_output": True}},
        default=Stream.PRE_NORM,
    ),
    "norm before fc": Switch(
        "the norm before fc", "project",
        {
            FuseNorm.NONE: {"fc_norm": False, "norm_before_fc": False},
            FuseNorm.WHOLE: {"fc_norm": False, "norm_before_fc": True},
            FuseNorm.PER_SLOT: {"fc_norm": True, "norm_before_fc": False},
        },
        default=FuseNorm.NONE,
    ),
    "rope pairs": Switch(
        "which elements RoPE rotates as pairs", "rope",
        {"interleaved": {"rope_interleave": True}, "halves": {"rope_interleave": False}},
        default="interleaved",
        note="the key is read for MLA drafts alone; all others rotate halves",
    ),
    "rope theta": Switch("RoPE's theta", "rope", key="rope_theta", default="10000"),
    "rope scaling": Switch("RoPE's scaling", "rope", key="rope_scaling", default="none"),
    "window": Switch("the sliding window", "window", key="sliding_window", default="none"),
    "context": Switch("the end of the draft's context", "context", key="max_position_embeddings"),
    "attention bias": Switch(
        "attention's bias", "load",
        {
            "none": {"attention_bias": False, "bias": False}, "q, k, v": {"attention_bias": True},
            "q, k, v, o": {"attention_bias": True}, "o": {"attention_bias": False, "bias": True},
        },
        default="none",
    ),
    "MLP bias": Switch(
        "the bias of the MLP", "load", {"none": {"mlp_bias": False}, "applied": {"mlp_bias": True}}, default="none"
    ),
    "embedding scale": Switch("the number that multiplies the embedding", "load", key="embedding_scale", default="1"),
}  # fmt: skip
"""Links that a config's keys decide, as they are published."""

SPECTRACE = Profile(
    engine="spectrace",
    ids=ID_KEYS,
    switches=SWITCHES,
    code=_CODE,
    wiring_flag="--wiring",
    serve="spectrace run --target TARGET --prompts PROMPTS --out NEW_TRACE --draft DRAFT",
)

GENERIC = Profile("an unknown engine", ID_KEYS, SWITCHES, {}, known=False)
"""Keys and conventions as drafts are published; of the engine itself nothing is known."""
