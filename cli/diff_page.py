"""What `spectrace diff` found, as a page and as one JSON document."""

from collections.abc import Iterator
from dataclasses import asdict
from math import inf, isfinite
from typing import TYPE_CHECKING, Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from spectrace.replay.diff.diff import Compared, Decisions, Diff, FirstDivergence, Plan, Verdict
from spectrace.replay.diff.sites import Where
from spectrace.replay.finding import Finding

if TYPE_CHECKING:
    from spectrace.replay.diff.attribution import Attribution

__all__ = ["diff_json", "plan_json", "render_diff"]

_STYLE = {
    Verdict.EQUAL: "green", Verdict.WITHIN: "green", Verdict.DIFFERENT: "bold red", Verdict.UNREAD: "yellow",
    Verdict.PART: "yellow",
}  # fmt: skip
_SETTINGS = 12
_WEIGHTS = 3
_ALONE = 8


def plan_json(plan: Plan) -> dict[str, Any]:
    """The `alignment` part of --json."""
    return {
        "requests": [{"a": pair.a, "b": pair.b, "shared": pair.shared, "parts": pair.parts} for pair in plan.texts],
        "requests_unpaired": {"a": list(plan.alone[0]), "b": list(plan.alone[1])},
        "paired": {name: pairs.rows for name, pairs in plan.families.items()},
        "unpaired": {name: {"a": pairs.unpaired[0], "b": pairs.unpaired[1]} for name, pairs in plan.families.items()},
    }


def diff_json(found: Diff, swapped: "Attribution | str | None") -> dict[str, Any]:
    """The document of --json. An error that is no number of JSON's is null, and `finite` false."""
    decisions = found.decisions
    lengths = [one.to_json() for one in decisions.acceptance] if decisions.acceptance else [None, None]
    document = {
        "verdict": found.verdict.value,
        "equal": found.verdict is Verdict.EQUAL,
        "within_floor": found.verdict in (Verdict.EQUAL, Verdict.WITHIN),
        "floor": found.floor,
        "smallest_passing_tolerance": _tolerance(found),
        "first_divergence": found.first and _first_json(found.first),
        "sites": [_site_json(one) for one in found.compared],
        "moved": [{**asdict(one), "site": str(one.site)} for one in found.moved],
        "hand_off": _findings_json(found.hand_off),
        "verification": _findings_json(found.verification),
        "ranks": {
            "unsharded": [
                {
                    "of": one.of,
                    "site": str(one.site),
                    "rows": one.rows,
                    **asdict(one.found),
                    "layout": one.found.layout.value,
                }
                for one in found.unsharded
            ],
            "apart": {name: [asdict(one) for one in apart] for name, apart in zip("ab", found.apart, strict=True)},
        },
        "decisions": {
            "splits": [asdict(one) for one in decisions.splits],
            "flips": [asdict(one) for one in decisions.flips],
            "likeness": [asdict(one) for one in decisions.likeness],
            "acceptance": {"a": lengths[0], "b": lengths[1]},
            "tokens_lost": decisions.tokens_lost,
            "attribution": swapped if swapped is None or isinstance(swapped, str) else asdict(swapped),
        },
        "alignment": plan_json(found.plan),
        "config_differences": [{"name": one.name, "a": one.a, "b": one.b} for one in found.settings],
        "coverage": {
            "sites_compared": len(found.compared),
            "lacking": list(found.lacking),
            "a": found.a.account().to_json(),
            "b": found.b.account().to_json(),
        },
        "bytes_read": {"a": found.bytes_read[0], "b": found.bytes_read[1]},
    }
    plain: dict[str, Any] = _plain(document)
    return plain


def render_diff(found: Diff, swapped: "Attribution | str | None") -> RenderableType:
    """The page a person reads."""
    parts: list[RenderableType] = [Text(f"A  {found.a.folder}\nB  {found.b.folder}", style="bold")]
    parts += [Text(), *_verdict(found), Text(), *_acceptance(found.decisions), *_attribution(swapped)]
    parts += [*_settings(found), Text(), _alignment(found), Text(), *_sites(found), Text()]
    parts += [*_decisions(found.decisions), Text(), *_coverage(found)]
    return Group(*parts)


def _verdict(found: Diff) -> Iterator[Text]:
    yield Text(found.verdict.value.upper(), style=_STYLE[found.verdict])
    if first := found.first:
        yield Text(_first_says(first, found))
    if found.earlier:
        yield Text(f"Earlier, by hash only: {found.earlier.site} at position {found.earlier.where.position}")
    for trace, name in ((found.a, "A"), (found.b, "B")):
        for line in (trace.manifest.get("import") or {}).get("contradictions") or ():
            yield Text(f"  {name} was imported against a CONTRADICTION: {line}", style="bold red")
    yield from map(Text, _held_instead(found))
    for name, *both in zip("AB", found.hand_off, found.verification, strict=True):
        for finding in (one for findings in both for one in findings):
            yield Text(f"  {name} by itself: {finding.title} ({finding.evidence[0]})")
    yield from _ranks(found)


def _held_instead(found: Diff) -> Iterator[str]:
    for one in found.moved:
        how = "bit for bit" if one.error is None else f"to {one.error:.1e}"
        yield f"  {one.site}: {one.says} ({one.rows} of {one.of} rows that differ, {how})"
    for site in (one for one in found.compared if one.handed):
        yield (
            f"  {site.site}: {site.handed} rows differ though both targets emitted the same bits for them: they were "
            "changed on their way"
        )


def _ranks(found: Diff) -> Iterator[Text]:
    """Ranks of one trace that do not agree, and how they hold what lies in parts."""
    for apart, name in zip(found.apart, "AB", strict=True):
        for one in apart:
            where = f"first at position {one.position} of request {one.request}"
            told = f"{name}'s rank {one.rank} has other {one.family} rows than its rank 0"
            yield Text(f"  {told}, {one.rows} of {one.of}, {where}")
    for held in found.unsharded:
        style = "bold red" if held.found.contradicts else ""
        what = "CONTRADICTS what was declared: " if held.found.contradicts else ""
        yield Text(f"  {held.of}'s ranks, {held.site}, {held.rows} rows: {what}{held.found.evidence}", style=style)


def _first_says(first: FirstDivergence, found: Diff) -> str:
    unread = found.verdict is Verdict.UNREAD
    what = "First divergence" if first.beyond else f"First bits that differ{'' if unread else ', within the floor'}"
    request, pass_ = (f"{a}" if a == b else f"{a} (B: {b})" for a, b in (first.where.request, first.where.pass_))
    where = f"position {first.where.position} of request {request}, pass {pass_}"
    error = "" if first.error is None else f", {_number(first.error)} of the row's maximum"
    if first.values:
        error = f", {first.values[0]} in A and {first.values[1]} in B"
    return f"{what}, among {len(found.compared)} sites compared: {first.site} at {where}{error}"


def _settings(found: Diff) -> Iterator[RenderableType]:
    both = [one for one in found.settings if one.a is not None and one.b is not None]
    shown, weights = [one for one in both if not one.weights], [one.name for one in both if one.weights]
    shown = [one for one in shown if not one.name.startswith("import.unknowns.")]
    alone = [one for one in found.settings if one.a is None or one.b is None]
    shown += alone if len(alone) <= _ALONE else []
    title = f"settings that differ: {len(both)}, and {len(alone)} that only one of them states"
    yield Text()
    yield Text(title, style="bold")
    for one in shown[:_SETTINGS]:
        yield Text(f"  {one}")
    if len(shown) > _SETTINGS:
        yield Text(f"  ... and {len(shown) - _SETTINGS} more, in --json")
    if weights:
        named = ", ".join(weights[:_WEIGHTS]) + (", ..." if len(weights) > _WEIGHTS else "")
        yield Text(f"  weights with other fingerprints, {len(weights)}: {named}")


def _alignment(found: Diff) -> RenderableType:
    return Text(str(found.plan))


def _sites(found: Diff) -> Iterator[RenderableType]:
    """Sites that differ, a line each; those that are equal in one."""
    shown = [one for one in found.compared if one.verdict is not Verdict.EQUAL]
    if shown:
        table = Table("site", "depth", box=None, pad_edge=False, padding=(0, 2, 0, 0))
        for column in ("rows", "bit-equal", "max", "median", "rel. L2", "cosine", "x floor"):
            table.add_column(column, justify="right", no_wrap=True)
        table.add_column("verdict", no_wrap=True)
        for one in shown:
            table.add_row(*_cells(one), Text(one.verdict.value, style=_STYLE[one.verdict]))
        factor = next((one.noise.factor for one in shown if one.noise), 0.0)
        title = f"sites, against {found.floor}; a difference from {factor:g} times the floor on"
        yield Text(f"{title}; errors are of the row's maximum", style="bold")
        yield table
    if equal := [str(one.site) for one in found.compared if one.verdict is Verdict.EQUAL]:
        yield Text(f"bit-equal, {len(equal)} of {len(found.compared)} sites: {', '.join(equal)}")


def _cells(one: Compared) -> list[str]:
    away, site = one.distance, one.site
    name = f"{site.family} {site.what}{'' if site.slot is None else f' {site.slot}'}"
    depth = str(site.depth) if site.family in ("received", "drafted") else ""
    cells = [name, depth, str(away.rows), f"{'~' if away.inferred else ''}{away.equal / away.rows:.1%}"]
    if site.exact:
        return [*cells, f"{away.rows - away.equal} differ", "-", "-", "-", "-"]
    return [
        *cells,
        *map(_number, (away.max_error, away.median_error, away.relative_l2, away.cosine, one.above)),
    ]


def _decisions(decisions: Decisions) -> Iterator[RenderableType]:
    for one in decisions.flips:
        if one.flips:
            who = "the target" if one.depth is None else f"the draft at depth {one.depth}"
            open_ = f", {one.open} of a margin that was not recorded" if one.open else ""
            yield Text(f"{who} chose another token in {one.flips} of {one.rows} rows: {one.ties} ties{open_}")
    for like in decisions.likeness:
        who = "target" if like.depth is None else f"draft, depth {like.depth}"
        yield Text(
            f"{who}: best token the same {like.same_best:.1%}, best 16 in common {like.overlap:.1%}, "
            f"KL >= {like.kl:.2g}, total variation >= {like.total_variation:.2g}, sum min(p, q) <= {like.shared:.4f}"
        )
    for split in decisions.splits:
        margin = "margin not recorded" if split.margin is None else f"margin {split.margin:.1e} of the largest logit"
        tie = "drawn" if split.drawn else {True: "a tie", False: "no tie", None: "a tie or not: unknown"}[split.tie]
        yield Text(
            f"request {split.a} (B: {split.b}) goes on with {split.token_a} in A, {split.token_b} in B, from position "
            f"{split.position}: {tie}, {margin}"
        )


def _acceptance(decisions: Decisions) -> Iterator[RenderableType]:
    if decisions.acceptance:
        lengths = [_number(one.acceptance_length) for one in decisions.acceptance]
        change = decisions.tokens_lost or 0.0
        lost = f"; B {'loses' if change > 0 else 'gains'} {abs(change):.3f} tokens a round" if change else ""
        yield Text(f"acceptance length: {lengths[0]} in A, {lengths[1]} in B{lost}")


def _attribution(swapped: "Attribution | str | None") -> Iterator[RenderableType]:
    """What each input is worth alone, where swapping could tell."""
    if swapped is None:
        return
    yield Text()
    if isinstance(swapped, str):
        yield Text(f"not attributed: {swapped}", style="yellow")
        return
    yield Text(f"one input swapped at a time, by replay over {swapped.places} places: {swapped}", style="bold")
    table = Table("input", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for column in ("A with B's", "B with A's", "lost", "regained", "share"):
        table.add_column(column, justify="right")
    table.add_column("")
    for one in (*swapped.swaps, *([swapped.together] if swapped.together else [])):
        share = "-" if one.share is None else f"{one.share:.0%}"
        cells = map(_length, (one.a_with_b, one.b_with_a, one.lost, one.regained))
        table.add_row(" and ".join(one.factors), *cells, share, one.told)
    yield table
    for name, side in zip("AB", swapped.served, strict=True):
        if side.served is not None:
            told = f"{side.served:.3f} served, {side.replayed:.3f} replayed on its own inputs"
            yield Text(f"{name} at these places: {told}")
    for reason, count in swapped.left_out.items():
        yield Text(f"left out of this: {count} requests, {reason}", style="dim")
    for note in swapped.notes:
        yield Text(f"note  {note}", style="dim")


def _coverage(found: Diff) -> Iterator[RenderableType]:
    if (tolerance := _tolerance(found)) is not None:
        told = (
            _number(tolerance)
            if isfinite(tolerance)
            else "none: tokens or positions differ, or rows were not recorded or only copied"
        )
        yield Text(f"smallest tolerance that would have passed: {told}")
    for line in found.lacking:
        yield Text(f"not compared  {line}", style="yellow")
    for name, trace in (("A", found.a), ("B", found.b)):
        lost = {family: one for family, one in trace.account().to_json().items() if one["dropped"] or one["failed"]}
        for family, one in lost.items():
            yield Text(
                f"{name} lacks {one['dropped'] + one['failed']} {family} rows that were lost while recording",
                style="yellow",
            )
    yield Text(f"read {found.bytes_read[0]:,} bytes of A, {found.bytes_read[1]:,} of B", style="dim")


def _tolerance(found: Diff) -> float | None:
    """The largest error anywhere: infinite where rows differ that were not recorded, or have nothing in common."""
    exactly = any(one.verdict is Verdict.DIFFERENT and (one.site.exact or one.handed) for one in found.compared)
    if exactly or any(one.distance.unread for one in found.compared):
        return inf
    return max((one.distance.max_error or 0.0 for one in found.compared if not one.site.exact), default=None)


def _first_json(first: FirstDivergence) -> dict[str, Any]:
    site = first.site
    drafting = {"depth": site.depth} if site.family in ("received", "drafted") else {}
    return {
        "family": site.family,
        "what": site.what,
        "slot": site.slot,
        **drafting,
        **_where_json(first.where),
        "error": first.error,
        "values": first.values and {"a": first.values[0], "b": first.values[1]},
        "beyond_floor": first.beyond,
    }


def _findings_json(findings: tuple[tuple[Finding, ...], tuple[Finding, ...]]) -> dict[str, Any]:
    """What each trace shows by itself."""
    return {
        name: [{"fault": one.fault, "title": one.title, "evidence": list(one.evidence)} for one in mine]
        for name, mine in zip("ab", findings, strict=True)
    }


def _where_json(where: Where) -> dict[str, Any]:
    both = {"request": where.request, "pass": where.pass_, "node": where.node}
    return {"position": where.position} | {name: {"a": a, "b": b} for name, (a, b) in both.items()}


def _site_json(one: Compared) -> dict[str, Any]:
    away = one.distance
    return {
        "family": one.site.family,
        "what": one.site.what,
        "slot": one.site.slot,
        "depth": one.site.depth,
        "rows": away.rows,
        "bit_equal": away.equal / away.rows if away.rows else None,
        "unread": away.unread,
        "inferred": away.inferred,
        "handed_otherwise": one.handed,
        "max_error": away.max_error,
        "mean_error": away.mean_error,
        "median_error": away.median_error,
        "finite": away.max_error is None or isfinite(away.max_error),
        "relative_l2": away.relative_l2,
        "cosine": away.cosine,
        "ulps": away.ulps,
        "floor": one.noise and one.noise.largest,
        "floor_median": one.noise and one.noise.median,
        "above_floor": one.above,
        "worst": [{"error": row.error, **_where_json(row.where)} for row in one.worst],
        "verdict": one.verdict.value,
    }


def _length(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _plain(value: Any) -> Any:
    """The same, with null for numbers that JSON does not have."""
    if isinstance(value, float):
        return value if isfinite(value) else None
    if isinstance(value, dict):
        return {str(name): _plain(one) for name, one in value.items()}
    return [_plain(one) for one in value] if isinstance(value, (list, tuple)) else value


def _number(value: float | None) -> str:
    if value is None or not isfinite(value):
        return "-"
    return f"{value:.3f}" if 0.01 <= abs(value) < 1000 else f"{value:.1e}" if value else "0"
