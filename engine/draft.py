"""The EAGLE-3 draft: a decoder layer over (token embedding, fused target features), as in arXiv 2503.01840.

Row p takes the target feature of position p and the embedding of token p+1, and predicts token p+2. Deeper rows take
the state fed back by the row before instead of a fused feature. Some drafts have further, plain decoder layers.

Shapes: T rows, A slots, F target width, H draft width, V draft vocabulary.
"""

from collections.abc import Mapping, Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from spectrace.engine.attention import Attend, RmsNorm, Turn, attention_of
from spectrace.engine.rope import inverse_frequencies, rotary_table, rotate
from spectrace.engine.spec import DraftSpec, FuseNorm, IdMap, Stream

__all__ = ["DraftModel"]


class _Mlp(nn.Module):
    def __init__(self, spec: DraftSpec) -> None:
        super().__init__()
        self.gate = nn.Linear(spec.width, spec.mlp_width, bias=spec.mlp_bias)
        self.up = nn.Linear(spec.width, spec.mlp_width, bias=spec.mlp_bias)
        self.down = nn.Linear(spec.mlp_width, spec.width, bias=spec.mlp_bias)

    def forward(self, x_TH: Tensor) -> Tensor:
        out: Tensor = self.down(F.silu(self.gate(x_TH)) * self.up(x_TH))
        return out


class _LaterLayer(nn.Module):
    """A decoder layer behind the first: it takes the state alone."""

    def __init__(self, spec: DraftSpec, layer: int) -> None:
        super().__init__()
        self.input_norm = RmsNorm(spec.width, spec)
        self.attention = attention_of(spec, layer)
        self.mlp_norm = RmsNorm(spec.width, spec)
        self.mlp = _Mlp(spec)

    def forward(self, h_TH: Tensor, turn: Turn, attend: Attend) -> Tensor:
        h_TH = h_TH + self.attention(self.input_norm(h_TH), turn, attend)
        out: Tensor = h_TH + self.mlp(self.mlp_norm(h_TH))
        return out


class DraftModel(nn.Module):
    """One draft for every dialect; `spec` holds the switches. The same module serves engine, replay and training."""

    def __init__(self, spec: DraftSpec) -> None:
        super().__init__()
        self.spec = spec
        norm_widths: Sequence[int] = {
            FuseNorm.NONE: (),
            FuseNorm.WHOLE: (spec.features_width,),
            FuseNorm.PER_SLOT: (spec.target_width,) * spec.slots,
        }[spec.fuse_norm]
        self.fuse_norms = nn.ModuleList(RmsNorm(width, spec) for width in norm_widths)
        self.fc = nn.Linear(spec.features_width, spec.width, bias=spec.fc_bias)
        self.embedding = nn.Embedding(spec.target_vocab, spec.width)
        self.embedding_norm = RmsNorm(spec.width, spec)
        self.feature_norm = RmsNorm(spec.width, spec)
        self.attention = attention_of(spec, 0)
        self.mlp_norm = RmsNorm(spec.width, spec)
        self.mlp = _Mlp(spec)
        self.later = nn.ModuleList(_LaterLayer(spec, layer) for layer in range(1, spec.layers))
        self.output_norm = RmsNorm(spec.width, spec)
        self.head = nn.Linear(spec.width, spec.draft_vocab, bias=False)
        if spec.id_map is not IdMap.NONE:
            self.register_buffer("d2t", torch.zeros(spec.draft_vocab, dtype=torch.int64))
        self.register_buffer("frequencies", inverse_frequencies(spec.rope, spec.rope_width), persistent=False)
        self.d2t: Tensor
        self.frequencies: Tensor

    def variant(self, *, spec: DraftSpec | None = None, tensors: Mapping[str, Tensor] | None = None) -> "DraftModel":
        """The same draft under other switches, or with some tensors replaced; all others are shared, not copied."""
        return DraftModel.over(spec or self.spec, {**self.state_dict(), **(tensors or {})})

    @classmethod
    def over(cls, spec: DraftSpec, tensors: Mapping[str, Tensor]) -> "DraftModel":
        """A draft ready to run over these very tensors, by the names that it has for them: nothing is copied."""
        with torch.device("meta"):
            made = cls(spec)
        made.load_state_dict({name: tensors[name] for name in made.state_dict()}, assign=True)
        made.frequencies = inverse_frequencies(spec.rope, spec.rope_width).to(made.fc.weight.device)
        return made.eval().requires_grad_(False)

    def fuse(self, features_TAF: Tensor) -> Tensor:
        """Project the wiring's concatenated boundaries [T, A*F] to draft width [T, H].

        Whether a norm comes first is a property of the checkpoint (`DraftSpec.fuse_norm`), never of the tensor's width:
        deciding by width is how engines silently skip `fc`.
        """
        if not self.spec.projects:
            return features_TAF
        if self.spec.fuse_norm is FuseNorm.WHOLE:
            features_TAF = self.fuse_norms[0](features_TAF)
        elif self.spec.fuse_norm is FuseNorm.PER_SLOT:
            slots = features_TAF.chunk(self.spec.slots, dim=-1)
            features_TAF = torch.cat([norm(slot) for norm, slot in zip(self.fuse_norms, slots, strict=True)], dim=-1)
        fused: Tensor = self.fc(features_TAF)
        return fused

    def forward(
        self, tokens_T: Tensor, states_TH: Tensor, positions_T: Tensor, attend: Attend
    ) -> tuple[Tensor, Tensor]:
        """Run the layers: returns what the head reads and what the next depth is fed, both [T, H]."""
        spec = self.spec
        cos, sin = rotary_table(self.frequencies, positions_T, scale=spec.rope.cos_scale)
        turn = partial(rotate, cos=cos, sin=sin, interleaved=spec.rope.interleaved)
        normed_TH = self.feature_norm(self.embedding_norm(states_TH) if spec.normed_twice else states_TH)
        inputs = torch.cat((self.embedding_norm(self.embed(tokens_T)), normed_TH), dim=-1)
        residual_TH = normed_TH if spec.residual is Stream.POST_NORM else states_TH
        h_TH = residual_TH + self.attention(inputs, turn, attend)
        h_TH = h_TH + self.mlp(self.mlp_norm(h_TH))
        for layer in self.later:
            h_TH = layer(h_TH, turn, attend)
        sides = {Stream.PRE_NORM: h_TH, Stream.POST_NORM: self.output_norm(h_TH)}
        return sides[spec.head_reads], sides[spec.feedback]

    def embed(self, tokens_T: Tensor) -> Tensor:
        """The tokens' embeddings [T, H], scaled in their own precision, as Gemma does."""
        rows_TH: Tensor = self.embedding(tokens_T)
        return rows_TH if self.spec.embedding_scale == 1 else rows_TH * rows_TH.new_tensor(self.spec.embedding_scale)

    def logits(self, hidden_TH: Tensor) -> Tensor:
        """Scores over the draft vocabulary [T, V]."""
        scores: Tensor = self.head(hidden_TH)
        return scores if self.spec.logit_scale == 1 else scores * self.spec.logit_scale

    def table(self) -> Tensor:
        """The target token ids that the draft vocabulary stands for [V]."""
        return self.to_target(torch.arange(self.spec.draft_vocab, device=self.fc.weight.device))

    def to_target(self, draft_ids: Tensor) -> Tensor:
        """Target token ids of draft ids: `d2t` holds offsets, id k stands for token k + d2t[k].

        Of a table that is read as tokens, numbers outside the vocabulary count on from its other end.
        """
        match self.spec.id_map:
            case IdMap.OFFSET:
                return draft_ids + self.d2t[draft_ids]
            case IdMap.ABSOLUTE:
                return self.d2t[draft_ids] % self.spec.target_vocab
            case IdMap.NONE:
                return draft_ids
