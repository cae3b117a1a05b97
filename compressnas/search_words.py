"""What the report says of a search: the cell, how it was found, what a benchmark knows of it."""

import re

from compressnas import readable
from compressnas.plots import STAGES as STAGES_OF_PRUNING
from compressnas.runfolder import Point, Proof, RunFolder, Search
from compressnas.search_plots import MAX_CHOICES, known

STAGES = STAGES_OF_PRUNING | {"train": "train"}
DATA = {"c10": "CIFAR-10", "c100": "CIFAR-100", "in16": "ImageNet16-120"}
SPLITS = {"test": "test", "valid": "validation"}


def headline(run: RunFolder, search: Search, slim: Point) -> list[str]:
    """The clauses of the sentence on top; what was not measured is not said."""
    clauses = []
    if slim.flops is not None:
        clauses.append(f"{readable.count(slim.flops)} FLOPs")
    if slim.params is not None:
        clauses.append(f"{readable.count(slim.params)} parameters")
    if slim.error is not None:
        clauses.append(f"test error {readable.percent(slim.error)}" + ("" if run.history else " (not trained)"))
    told = [(figure_name(key), value) for key, value in (search.table or {}).items() if key.endswith("_test_200")]
    clauses += [f"{name.removesuffix(', %')}: {value:.2f} % in the table" for name, value in told if value is not None]
    return clauses


def figure_name(key: str) -> str:
    """`c10_test_200` -> `CIFAR-10 test, 200 epochs, %`; an unknown key stays as it is."""
    found = re.fullmatch(r"(c10|c100|in16)_(test|valid)_(\d+)", key)
    return f"{DATA[found[1]]} {SPLITS[found[2]]}, {found[3]} epochs, %" if found else key


def table(search: Search) -> list[tuple[str, str]]:
    """Name and figure of everything that the benchmark knows of the cell."""
    figures = (search.table or {}).items()
    return [(figure_name(key), f"{value:.2f}" if figure_name(key) != key else f"{value:g}")
            for key, value in figures if value is not None]  # fmt: skip


def proof(proof: Proof | None, proved: bool) -> str:
    """Whether the derived network is what the supernet computes with all else masked."""
    if proof is None or proof.max_relative_difference is None:
        return "This run carries no proof that the derived network is the cell of the supernet."
    images = f"on {proof.images} real images " if proof.images else ""
    difference = readable.scientific(proof.max_relative_difference)
    text = "The supernet, with all but the kept candidates masked, and the derived network with the same weights were "
    text += f"compared {images}in float64. "
    allowed = "" if proof.tolerance is None else f" ({readable.power(proof.tolerance)} is allowed)"
    if not proved:
        return text + f"They differ by {difference} of the largest output{allowed}: they are not the same network."
    return text + f"The largest difference is {difference} of the largest output{allowed}: they are the same network."


def story(search: Search) -> list[str]:
    """How the cell was found, in sentences."""
    space = f" `{search.space}`" if search.space else ""
    said = []
    if search.method == "nasi":
        said.append(f"NASI searched the space{space} at initialisation, before any training: the alphas start at zero "
                    "and climb the trace norm T of the cells that are drawn, as long as T is below nu. Of each choice, "
                    "what has the largest alpha is kept, unless nothing would come through such a cell.")  # fmt: skip
        said += _checks(search)
    elif search.method == "proxy":
        score = f" (`{search.score_name}`)" if search.score_name else ""
        tried = f"{readable.counted(len(search.scores), 'cell')} of " if search.scores else ""
        said.append(f"At initialisation, before any training, {tried}the space{space} were scored{score}; the one with "
                    "the best score is kept.")  # fmt: skip
    elif search.method == "cell":
        said.append(f"The cell was given; nothing was searched in the space{space}.")
    elif search.space:
        said.append(f"The space{space} was searched.")
    if search.traces and not any(trace is not None and trace > 0 for trace in search.traces):
        said.append("No step has a trace norm above zero, so there is nothing to draw of them.")
    if search.scores and all(score is None for score in search.scores):
        said.append("No score is finite, so there is nothing to draw of them.")
    if len(known(search)) > MAX_CHOICES:
        said.append(f"The alphas of {len(known(search)) - MAX_CHOICES} more choices are in result.json.")
    return said


def _checks(search: Search) -> list[str]:
    """What came of it where decisions were held to nu."""
    limit, traces = (search.limits or [None])[-1], [one.trace for one in search.checks or []]
    if limit is None or not traces or any(trace is None for trace in traces):
        return []
    taken = [trace for trace in traces if trace is not None]
    tried = f"T of decisions themselves was taken by falling alpha, of {readable.counted(len(taken), 'cell')}"
    if taken[-1] <= limit:
        return [f"{tried}; the last is the first with T up to nu ({taken[-1]:.3g}, and nu is {limit:.3g}): it is kept."]
    return [f"{tried}; each T is above nu ({limit:.3g}), and the cell with the smallest is kept ({min(taken):.3g})."]


def footnotes(search: Search, points: int, measured: set[str], uncounted: list[str]) -> list[str]:
    """What the rows of the table mean."""
    said = ["FLOPs are what fvcore counts: one per multiply-add."]
    if "flops_theoretical" in measured:
        said[0] += " Realised: of the network as it is. Theoretical: if every weight that is zero were free."
    if "flops_bias_convention" in measured:
        said.append("Bias-counting convention: (K x K x C_in + 1) H_out W_out C_out for a convolution, "
                    "(n_in + 1) n_out for a linear layer.")  # fmt: skip
    said += [f"Operations fvcore does not count, {line}." for line in uncounted]
    if measured & {"latency_p50_ms", "latency_p90_ms"}:
        timed = ", the networks timed interleaved" if points > 1 else ""
        said.append(f"Latency: ONNX Runtime on the machine below{timed}. p50 is the median, nine in ten calls are "
                    "faster than p90.")  # fmt: skip
    where = "the test split or the benchmark's table" if search.table else "the test split"
    said.append(f"No choice looks at {where}. points.csv has all digits.")
    return said
