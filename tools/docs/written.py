# SPDX-License-Identifier: Apache-2.0
"""What README and pages say of the records in sentences and tables that are kept in the repository.

    python tools/docs/written.py [--made FOLDER]

is what ``make results`` runs before it builds the site. It renews, from the committed records: the tables below
docs/results, the pictures, and whatever stands between ``<!-- written: NAME -->`` and ``<!-- end -->`` in README and
docs. With ``--made``, finished records of tools/results_grid.py are brought into docs/results first. What can wait
for the site is not written but generated when it is built (``<!-- generated: NAME -->``, tools/docs/hooks.py).
"""

from __future__ import annotations

import argparse
import csv
import os
import re
import shutil
import subprocess
import sys
import textwrap
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from statistics import fmean, stdev
from tempfile import TemporaryDirectory

sys.path.insert(0, str(Path(__file__).parent))
import decisions
import evidence
import expected
import findings
import measured
import remarks
import rendered
import result_tables
from decisions import forgotten
from evidence import DATA, JOINT, MOS, ONE_A, PLUS, ROOT, difference, main_runs

from onea.learner.one_a import OneAPlusOptions
from onea.research.methods.one_a import OneAPlus
from onea.research.record import write_record

WIDTH = 130
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), ROOT / "docs/results/README.md")
MARK = re.compile(r"<!-- written: (\S+) -->(\n?)(.*?)(\n?)<!-- end -->", re.S)
_REWRITE = "the records no longer say what this sentence says; write another one"
_COUNTS = ("no", "one", "two", "three", "four", "five")
_PLAIN = {JOINT: "joint training (upper bound)", "sequential": "sequential (lower bound)"}


def counted(number: int) -> str:
    """
    >>> counted(1), counted(5)
    ('one seed', 'five seeds')
    """
    return f"{_COUNTS[number]} seed{'s' if number > 1 else ''}"


def a_t(method: str, digits: int = 1) -> list[str]:
    """A_T of a method on the two main streams."""
    return [f"{main_runs(data)[method].of('A_T').value:.{digits}f}" for data in DATA]


def seeds(method: str) -> str:
    """How many seeds a method has, the fewer of the two streams."""
    return counted(min(len(main_runs(data)[method].records) for data in DATA))


# of the README


def plus_and_one_a() -> str:
    """What One-A+ gains over One-A, and what is still missing."""
    plus, one_a = a_t(PLUS), a_t(ONE_A)
    return (
        f"After the last task, One-A+ answers {plus[0]} % of CIFAR-100 right where One-A answers {one_a[0]} %, and "
        f"{plus[1]} % of CUB-200 where One-A answers {one_a[1]} % ({seeds(PLUS)}). {bound()}"
    )


def bound() -> str:
    """What joint training reaches; with fewer seeds than One-A+, beside One-A+ with the same ones."""
    joint = a_t(JOINT)
    told = "" if seeds(JOINT) == seeds(PLUS) else f" with {same_seeds()}"
    return f"Joint training, which sees all images at once, reaches {joint[0]} and {joint[1]} %{told}."


def same_seeds() -> str:
    """The seeds of joint training, and One-A+ with the same ones."""
    plus = []
    for data in DATA:
        runs = main_runs(data)
        plus.append(fmean(runs[PLUS].seeds[seed]["metrics"]["A_T"] for seed in runs[JOINT].seeds))
    numbers = remarks.listed([str(seed) for seed in sorted(main_runs("cifar100")[JOINT].seeds)])
    return f"seed {numbers}, where One-A+ reaches {plus[0]:.1f} and {plus[1]:.1f} %"


def methods() -> str:
    """Every method: accuracy on both streams, seeds and passes."""
    rows = []
    for name in main_runs("cifar100"):
        both = [main_runs(data)[name] for data in DATA]
        title = _PLAIN.get(name, both[0].title)
        title = f"**{title}**" if name in (PLUS, ONE_A) else title
        marks = [remarks.marked(runs) for runs in both]
        whole = marks[0] if marks[0] == marks[1] else ""
        rows.append(
            (
                title + whole,
                *(f"{runs.of('A_T').value:.2f}{'' if whole else mark}" for runs, mark in zip(both, marks, strict=True)),
                " / ".join(dict.fromkeys(str(len(runs.records)) for runs in both)),
                result_tables.passes(*both),
            )
        )
    return result_tables.table(("", *DATA.values(), "n", "passes"), rows, words=1)


def nearest() -> str:
    """One-A+ against the nearest rival of one pass, and against MOS."""
    told, gaps, mos = [], [], []
    for data in DATA:
        own = main_runs(data)[PLUS]
        told.append(f"{own.of('A_T').value:.2f} ± {stdev(record['metrics']['A_T'] for record in own.records):.2f}")
        rivals = [runs for runs in result_tables.rival_runs(data).values() if runs.records != own.records]
        best = max((runs for runs in rivals if runs.cost("passes") == 1), key=lambda runs: runs.of("A_T").value)
        gaps.append(difference(best, own))
        mos.append(difference(main_runs(data)[MOS], own).value)
    beats = "beats" if min(*(gap.value for gap in gaps), *mos) > 0 else "differs from"
    ahead = [decisions.inside(gap).replace(", ", " (", 1) + ")" for gap in gaps]
    ahead = [text.replace("+", "") for text in ahead] if beats == "beats" else ahead
    return (
        f"One-A+ over {seeds(PLUS)}: {told[0]} and {told[1]} (mean and deviation). It {beats} the best rival of one "
        f"pass, rivals with One-A+'s classifier included, by {ahead[0]} on CIFAR-100 and by {ahead[1]} on CUB-200 "
        "([table, other streams, and how](docs/one-a-plus.md)), and MOS, which takes several passes and keeps an "
        f"adapter for every task, by {mos[0]:.1f} and {mos[1]:.1f}."
    )


def parts() -> str:
    """What each part of One-A adds."""
    runs = [evidence.parts(10, row) for row in ("none", "GW", "ASA + GW", "ASA + GW + DG")]
    right = [each.of("A_T").value for each in runs]
    deviation = stdev(record["metrics"]["A_T"] for record in runs[-1].records)
    change = difference(runs[2], runs[3], forgotten)
    moved, _, interval = decisions.inside(change).partition(", ")
    chance = "" if change.decided else f": {counted(change.count)} do not decide it"
    most = ": most of the gain comes from the weights"
    preset = ", an earlier preset" if runs[0].earlier else ""
    return (
        f"One-A's parts (CIFAR-100, 10 tasks, {counted(runs[0].of('A_T').count)}{preset}): {right[0]:.2f} if both "
        f"sides weigh the same at every merge, the paper's baseline; {right[1]:.2f} with weights by classes, "
        f"{right[2]:.2f} with alignment as well, and {right[3]:.2f} ± {deviation:.2f} with gating"
        + (most if right[1] - right[0] > right[3] - right[1] else "")
        + f". Gating changes forgetting by {moved} ({interval}){chance}."
    )


def demo() -> str:
    """What `onea demo` printed at its end, on two cores."""
    return f"```text\n{(ROOT / 'benchmarks/speed/demo-amd-epyc-2.txt').read_text('utf-8')}```"


# of the pages


def summary() -> str:
    """What One-A+ reaches, and joint training."""
    plus = a_t(PLUS)
    return (
        f"After the last task it reaches **{plus[0]} %** on CIFAR-100 in ten uneven tasks and **{plus[1]} %** on "
        f"CUB-200 in twenty ({seeds(PLUS)}, `{evidence.NETWORK}`; [table and records](results/one-a-plus/table.md)). "
        f"{bound()}"
    )


def earlier_of_plus() -> str:
    """Which tables about One-A+ hold runs of an earlier preset; nothing once none does."""
    rivals = [runs for data in DATA for runs in result_tables.rival_runs(data).values()]
    attributed = [result_tables.attributed(data, "merged", "one-a", "rgda") for data in DATA]
    held = {
        "rows marked †": any(runs.earlier for runs in rivals),
        "other streams": not all(map(evidence.is_current, evidence.records("streams/runs"))),
        "[what each change gives](#what-each-change-gives)": any(runs.earlier for runs in attributed),
    }
    told = remarks.listed([name for name, earlier in held.items() if earlier])
    return f"Made with [earlier presets](results/README.md#earlier-runs): {told}." if any(held.values()) else ""


def kept() -> str:
    """What One-A+ and One-A keep."""
    megabytes = {name: [f"{main_runs(data)[name].cost('state_mb'):.1f}" for data in DATA] for name in (PLUS, ONE_A)}
    plus, one_a = megabytes[PLUS], megabytes[ONE_A]
    return f"{plus[0]} MB for 100 classes of a ViT-S, {plus[1]} MB for 200 (One-A: {one_a[0]} and {one_a[1]} MB)"


def ranged(values: Iterable[float], digits: int = 0) -> str:
    """
    >>> ranged([3.2, 1.4, 2.0]), ranged([0.21, 0.98], digits=1)
    ('1 to 3', '0.2 to 1.0')
    """
    found = sorted(values)
    return f"{found[0]:.{digits}f} to {found[-1]:.{digits}f}"


def answering() -> str:
    """How much longer an answer takes than One-A's, in percent."""
    with (ROOT / "benchmarks/speed/answering-nvidia-h200.csv").open(encoding="utf-8") as file:
        return ranged((100 * (float(line["ratio"]) - 1) for line in csv.DictReader(file)), digits=1)


def attribution() -> str:
    """What each change gives, in words."""

    def of(data: str, start: str, merge: str, classifier: str = "rgda") -> float:
        return result_tables.attributed(data, start, merge, classifier).of("A_T").value

    starts, merges = ("fresh", "merged"), ("one-a", "weighted-mean")
    every = [(data, start, merge) for data in DATA for start in starts for merge in (*merges, "newest")]
    classifier = [of(*each) - of(*each, "ncm") for each in every]
    start = {
        data: [of(data, "merged", merge) - of(data, "fresh", merge) for merge in (*merges, "newest")] for data in DATA
    }
    merged = [of("cifar100", begin, merge) - of("cifar100", begin, "newest") for begin in starts for merge in merges]
    gains = {(d, s): of(d, s, "weighted-mean") - of(d, s, "one-a") for d in DATA for s in starts}
    best = gains.pop(("cub200", "merged"))
    assert best > 0, _REWRITE
    assert fmean(classifier) > max(map(fmean, (*start.values(), merged))), _REWRITE
    return (
        f"The classifier contributes most ({ranged(classifier)} points). Starting from the merged adapter adds "
        f"{ranged(start['cub200'])} points on CUB-200 and {ranged(start['cifar100'])} on CIFAR-100; there it matters "
        f"that adapters are merged at all ({ranged(merged)} points). **One-A's merge is not better than a weighted "
        f"mean**: they differ by at most {max(map(abs, gains.values())):.1f} points, except on CUB-200 from the merged "
        f"adapter, where the weighted mean is {best:.1f} points better."
    )


def comparison() -> str:
    """What `onea compare` prints about One-A without gates and with them."""
    from onea.research.cli.report import compare

    before = os.environ.get("COLUMNS")
    os.environ["COLUMNS"] = "100"
    try:
        with TemporaryDirectory() as folder, redirect_stdout(StringIO()) as printed:
            for side, row in (("first", "ASA + GW"), ("second", "ASA + GW + DG")):
                for seed, record in evidence.parts(10, row).seeds.items():
                    write_record(Path(folder) / side / str(seed), record)
            compare(f"{folder}/first", f"{folder}/second")
    finally:
        os.environ.pop("COLUMNS")
        os.environ |= {"COLUMNS": before} if before else {}
    return "```text\n" + "".join(f"{line.rstrip()}\n" for line in printed.getvalue().splitlines()) + "```"


def largest_record() -> str:
    """The size of the largest committed record."""
    return f"{max(path.stat().st_size for path in evidence.RESULTS.rglob('record.json.gz')) / 1000:.0f} KB"


def gap() -> str:
    """How many points of accuracy updates cost against all images at once, from the least to the most measured."""
    runs = [main_runs(data) for data in DATA]
    gaps = [each[JOINT].of("A_T").value - each[PLUS].of("A_T").value for each in runs]
    updates, at_once = map(float, result_tables.grocery())
    gaps += [at_once - updates, *expected.costs_of_updates()]
    return ranged(gaps) if min(gaps) >= 0.5 else f"up to {max(gaps):.0f}"


def plus_rates() -> str:
    """The learning rate of One-A+ in research runs, and in models."""
    return f"{OneAPlus.base_learning_rate:g} in research runs and {OneAPlusOptions.learning_rate:g} in models"


def verdicts() -> str:
    """How many of the paper's claims hold here."""
    found = Counter(claim.verdict for claim in findings.claims())
    return (
        f"of {found.total()} claims that we checked on a small network, {found['holds']} hold, "
        f"{found['does not hold']} do not, {found['not seen']} effects are not seen, {found['undecided']} are "
        f"undecided, and {found['one run']} rest on one run"
    )


def expected_seeds() -> str:
    """Behind the table of what to expect."""
    return seeds(PLUS) if seeds(PLUS) == seeds(JOINT) else f"{seeds(PLUS)} (all images at once: {same_seeds()})"


def methods_seeds() -> str:
    """How many seeds stand behind the methods, in words."""
    found: dict[int, list[str]] = {}
    for name, runs in main_runs("cifar100").items():
        if name != PLUS:
            counts = [len(runs.records), len(main_runs("cub200")[name].records)]
            only = "" if counts[0] == counts[1] else f" (on {('CIFAR-100', 'CUB-200')[counts.index(min(counts))]})"
            found.setdefault(min(counts), []).append(runs.title + only)
    most, *fewer = sorted(found, reverse=True)
    if not fewer:
        return f"{counted(most)} each"
    return "; ".join([counted(most), *(f"{counted(number)} of {remarks.listed(found[number])}" for number in fewer)])


def below_frozen() -> str:
    """Which methods stay below frozen features on CUB-200."""
    runs = main_runs("cub200")
    frozen = runs["simplecil"].of("A_T").value
    several = {each.title: each.of("A_T").value for each in runs.values() if len(each.records) > 1}
    listing = [f"{title} {value:.1f}" for title, value in several.items() if value < frozen]
    return f"On CUB-200, {remarks.listed(listing)} stay below frozen features (SimpleCIL {frozen:.1f})."


WRITTEN: dict[str, Callable[[], str]] = {
    "plus-and-one-a": plus_and_one_a,
    "presets-of-readme": lambda: remarks.presets("docs/"),
    "earlier-of-plus": earlier_of_plus,
    "single-seeds": remarks.single_seeds,
    "methods": methods,
    "nearest": nearest,
    "parts": parts,
    "demo": demo,
    "summary": summary,
    "kept": kept,
    "comparison": comparison,
    "largest-record": largest_record,
    "gap": gap,
    "answering": answering,
    "attribution": attribution,
    "plus-rates": plus_rates,
    "verdicts": verdicts,
    "expected-seeds": expected_seeds,
    "methods-seeds": methods_seeds,
    "below-frozen": below_frozen,
    "groceries": expected.groceries,
    "taught-again": expected.again,
    "taught-again-unknown": expected.unknown_again,
} | measured.WRITTEN


def renewed(text: str) -> str:
    """A page with all that is written in it made again; paragraphs and tables stand on lines of their own."""

    def write(found: re.Match[str]) -> str:
        name, block = found[1], found[2]
        content = WRITTEN[name]()
        if block and not content.startswith(("|", "```")):
            content = textwrap.fill(content, WIDTH, break_long_words=False, break_on_hyphens=False)
        return f"<!-- written: {name} -->{block}{content}{block and content and block}<!-- end -->"

    return MARK.sub(write, text)


def main() -> None:
    """Renew tables, pictures and pages."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--made", type=Path, help="a folder of finished runs, to be brought into docs/results first")
    given = parser.parse_args()
    if given.made:
        grid = ROOT / "tools/results_grid.py"
        subprocess.run([sys.executable, str(grid), "collect", str(given.made)], check=True)
    made = rendered.made()
    for path in sorted(made.rglob("*")):
        if path.suffix in (".csv", ".md"):
            shutil.copy(path, evidence.RESULTS / path.relative_to(made))
    subprocess.run([sys.executable, str(ROOT / "tools/docs/pictures.py")], check=True, stdout=subprocess.DEVNULL)
    for page in PAGES:
        text = page.read_text("utf-8")
        if (new := renewed(text)) != text:
            page.write_text(new, "utf-8")
            print(page.relative_to(ROOT))


if __name__ == "__main__":
    main()
