# SPDX-License-Identifier: Apache-2.0
"""Reference tables from the source: methods, operators, options, commands, experiments of the paper."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import griffe
from measured import GPU, bench
from results import table

OPTIONS_FOR = "cifar100"  # defaults such as the number of epochs depend on the data


def methods_table() -> str:
    """Every registered method."""
    from onea.research.methods import METHODS, method_class

    def row(name: str) -> Sequence[str]:
        kind = method_class(name)
        passes = " / ".join(f"{kind.forward_passes(kind.Options(), tasks):g}" for tasks in (1, 10, 40))
        title = f"[{kind.title}]({kind.paper})" if kind.paper else kind.title
        return f"`{name}`", title, kind.trains, kind.stores, passes, "yes" if kind.in_paper else ""

    heads = ("name", "method", "trains", "keeps", "passes after 1 / 10 / 40 tasks", "in the paper")
    return table(heads, (row(name) for name in METHODS.builtin))


def base_rates() -> str:
    """The learning rate of the default preset for each method that trains."""
    from onea.research.methods import METHODS, method_class

    rates = {name: method_class(name).base_learning_rate for name in METHODS.builtin}
    return table(("method", "base rate"), ((f"`{name}`", f"{rate:g}") for name, rate in rates.items() if rate))


def method_options() -> str:
    """The options of each method with their defaults in a run."""
    from onea.research.methods import METHODS, method_class
    from onea.research.paper.plan import option_values
    from onea.research.runs.config import RunConfig

    def options(kind: Any, name: str) -> str:
        return _options(kind.Options, option_values(name, RunConfig.preset, OPTIONS_FOR), f"default for {OPTIONS_FOR}")

    kinds = {name: method_class(name) for name in METHODS.builtin}
    return "\n\n".join(_folded(f"`{name}`: {kind.title}", options(kind, name)) for name, kind in kinds.items())


def operators_table() -> str:
    """Every registered merging operator."""
    from onea.merging import OPERATORS, operator_class

    def row(name: str) -> Sequence[str]:
        kind = operator_class(name)
        marks = ["yes" if flag else "" for flag in (kind.uses_sizes, kind.associative)]
        needs = {"": "", "fisher": "Fisher information", "gram": "Gram matrices"}[kind.needs]
        return f"`{name}`", f"[{kind.title}]({kind.paper})" if kind.paper else kind.title, *marks, needs

    heads = ("name", "operator", "uses sizes", "order-independent", "needs statistics")
    return table(heads, (row(name) for name in OPERATORS.builtin))


def operator_options() -> str:
    """The options of each operator that has any."""
    import dataclasses

    from onea.merging import OPERATORS, operator_class

    kinds = {name: operator_class(name) for name in OPERATORS.builtin}
    return "\n\n".join(
        _folded(f"`{name}`: {kind.title}", _options(kind)) for name, kind in kinds.items() if dataclasses.fields(kind)
    )


def classifiers_table() -> str:
    """Every registered classifier."""
    from onea.classifiers import CLASSIFIERS, classifier_class

    def row(name: str) -> Sequence[str]:
        kind = classifier_class(name)
        return f"`{name}`", f"[{kind.title}]({kind.paper})", kind.stores, "yes" if kind.follows_drift else ""

    return table(("name", "classifier", "keeps", "follows the adapter"), (row(name) for name in CLASSIFIERS.builtin))


def datasets_table() -> str:
    """All datasets by their names on the command line."""
    from onea.research.data.sources import DATASETS

    return table(
        ("`--data`", "what it is"), ((f"`{info.usage}`", info.description) for info in DATASETS.load_all().values())
    )


def commands_reference() -> str:
    """All commands with their arguments and options, from the parser."""
    import typer

    from onea.cli.app import app
    from onea.cli.examples import EXAMPLES

    group: Any = typer.main.get_command(app)
    return "\n\n".join(_command(name, command, EXAMPLES[name]) for name, command in group.commands.items())


def _command(name: str, command: Any, examples: Sequence[str]) -> str:
    usage, rows = ["onea", name], []
    for parameter in command.params:
        if getattr(parameter, "hidden", False):
            continue
        if parameter.param_type_name == "argument":
            shown = f"`{parameter.name.upper()}`"
            many = parameter.name.upper() + ("..." if parameter.nargs == -1 else "")
            usage.append(many if parameter.required else f"[{many}]")
        else:
            shown = ", ".join(f"`{word}`" for word in (*parameter.opts, *parameter.secondary_opts))
        rows.append((shown, parameter.help or "", _default(parameter)))
    help_text = " ".join((command.help or "").split())
    shape = f"```text\n{' '.join(usage)} [OPTIONS]\n```"
    shown = "```sh\n" + "\n".join(examples) + "\n```"
    return "\n\n".join([f"## onea {name}", help_text, shape, shown, table(("", "meaning", "default"), rows)])


def _default(parameter: Any) -> str:
    if isinstance(getattr(parameter, "show_default", None), str):
        return str(parameter.show_default)
    value = parameter.default
    return "" if parameter.required or value is None or value is False or callable(value) else f"`{value}`"


def _options(kind: type, values: Mapping[str, Any] | None = None, head: str = "default") -> str:
    from onea.options import list_options

    rows = []
    for name, default, meaning in list_options(kind):
        value = str(values[name] if values else default)
        words = (meaning[:1].upper() + meaning[1:]).replace("``", "`")
        rows.append((f"`--{name.replace('_', '-')}`", value and f"`{value}`", words))
    return table(("option", head, "meaning"), rows)


def _folded(title: str, content: str) -> str:
    body = "\n".join(f"    {line}" for line in content.splitlines())
    return f'??? note "{title}"\n\n{body}'


def paper_experiments() -> str:
    """All tables and figures of the paper: command, number of runs, and GPU hours at the speed in our benchmark."""
    from onea.research.paper.experiments import experiments
    from onea.research.paper.plan import Changes, estimate, make_plan, published_counts

    rates = [bench(GPU, *what, "images/s", "fast") for what in (("training", "batch 128"), ("inference", "batch 256"))]

    def hours(config: Any) -> float:
        cost = estimate(config, published_counts(config.data))
        counts = (cost.training, cost.evaluation)
        return sum(count / (rate or 1.0) for count, rate in zip(counts, rates, strict=True)) / 3600

    rows: list[Sequence[str]] = []
    all_configs: dict[str, Any] = {}
    for experiment in experiments().values():
        configs = make_plan(experiment, Changes(), published_counts).configs
        all_configs |= {config.key(): config for config in configs}
        numbers = (str(len(configs) or ""), f"{sum(map(hours, configs)):.1f}" if configs else "")
        rows.append((experiment.heading, f"`onea paper {experiment.alias}`", *numbers))
    total = f"{sum(map(hours, all_configs.values())):.0f}"
    rows.append(("all, with shared runs counted once", "", str(len(all_configs)), total))
    return table(("in the paper", "command", "runs", "GPU hours"), rows, words=2)


_EXAMPLE = re.compile(r"^>>> .*?(?=\n\s*\n|\Z)", re.M | re.S)


class FencedDoctests(griffe.Extension):
    """Fences the examples of docstrings."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Fence the examples of an object's docstring; called by griffe."""
        if obj.docstring:
            obj.docstring.value = _EXAMPLE.sub(lambda match: f"```pycon\n{match[0]}\n```", obj.docstring.value)


TABLES: dict[str, Callable[[], str]] = {
    "methods-reference": methods_table,
    "base-rates": base_rates,
    "method-options": method_options,
    "operators": operators_table,
    "classifiers": classifiers_table,
    "operator-options": operator_options,
    "datasets": datasets_table,
    "commands": commands_reference,
    "paper-experiments": paper_experiments,
}
