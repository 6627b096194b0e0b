"""The EAGLE-3 draft: one decoder layer over (token embedding, fused target features), as in arXiv 2503.01840.

Row p takes the target feature of position p and the embedding of token p+1, and predicts token p+2. Deeper rows take
the state fed back by the row before instead of a fused feature.

Shapes: T rows, A slots, F target width, H draft width, V draft vocabulary.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from spectrace.engine.attention import Attend, GroupedQueryAttention, LatentAttention, RmsNorm
from spectrace.engine.rope import inverse_frequencies
from spectrace.engine.spec import DraftSpec, FuseNorm, IdMap, MlaSpec, Stream

__all__ = ["DraftModel"]


class _Mlp(nn.Module):
    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, inner, bias=False)
        self.up = nn.Linear(width, inner, bias=False)
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x_TH: Tensor) -> Tensor:
        out: Tensor = self.down(F.silu(self.gate(x_TH)) * self.up(x_TH))
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
        self.fuse_norms = nn.ModuleList(RmsNorm(width, spec.norm_eps) for width in norm_widths)
        self.fc = nn.Linear(spec.features_width, spec.width, bias=False)
        self.embedding = nn.Embedding(spec.target_vocab, spec.width)
        self.embedding_norm = RmsNorm(spec.width, spec.norm_eps)
        self.feature_norm = RmsNorm(spec.width, spec.norm_eps)
        self.attention: GroupedQueryAttention | LatentAttention = (
            LatentAttention(spec, spec.attention)
            if isinstance(spec.attention, MlaSpec)
            else GroupedQueryAttention(spec, spec.attention)
        )
        self.mlp_norm = RmsNorm(spec.width, spec.norm_eps)
        self.mlp = _Mlp(spec.width, spec.mlp_width)
        self.output_norm = RmsNorm(spec.width, spec.norm_eps)
        self.head = nn.Linear(spec.width, spec.draft_vocab, bias=False)
        if spec.id_map is not IdMap.NONE:
            self.register_buffer("d2t", torch.zeros(spec.draft_vocab, dtype=torch.int64))
        self.d2t: Tensor

    def variant(self, *, spec: DraftSpec | None = None, tensors: Mapping[str, Tensor] | None = None) -> "DraftModel":
        """The same draft under other switches, or with some tensors replaced; all others are shared, not copied."""
        return DraftModel.over(spec or self.spec, {**self.state_dict(), **(tensors or {})})

    @classmethod
    def over(cls, spec: DraftSpec, tensors: Mapping[str, Tensor]) -> "DraftModel":
        """A draft ready to run over these very tensors, by the names that it has for them: nothing is copied."""
        with torch.device("meta"):
            made = cls(spec)
        made.load_state_dict({name: tensors[name] for name in made.state_dict()}, assign=True)
        made.attention.frequencies = inverse_frequencies(spec.rope, spec.rope_width).to(made.fc.weight.device)
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
        """Run the layer: returns what the head reads and what the next depth is fed, both [T, H]."""
        normed_TH = self.feature_norm(states_TH)
        inputs = torch.cat((self.embedding_norm(self.embedding(tokens_T)), normed_TH), dim=-1)
        residual_TH = normed_TH if self.spec.residual is Stream.POST_NORM else states_TH
        h_TH = residual_TH + self.attention(inputs, positions_T, attend)
        h_TH = h_TH + self.mlp(self.mlp_norm(h_TH))
        hidden_TH = self.output_norm(h_TH)
        return hidden_TH, hidden_TH if self.spec.feedback is Stream.POST_NORM else h_TH

    def logits(self, hidden_TH: Tensor) -> Tensor:
        """Scores over the draft vocabulary [T, V]."""
        scores: Tensor = self.head(hidden_TH)
        return scores

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
