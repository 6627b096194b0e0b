"""Write the analytic pair of a family: `python models/analytic/make.py --family kimi_k25 --out DIR`."""

import sys
from pathlib import Path

import click

sys.path.append(str(Path(__file__).resolve().parents[1]))

from analytic.codes import FAMILIES
from analytic.pair import make_pair


@click.command()
@click.option("--family", type=click.Choice(list(FAMILIES)), required=True)
@click.option("--out", type=click.Path(path_type=Path, file_okay=False), required=True, help="Gets target/ and draft/.")
def main(family: str, out: Path) -> None:
    target, draft, _ = make_pair(family, out)
    print(target, draft, sep="\n")


if __name__ == "__main__":
    main()
