"""Numbers as people read them."""

import re


def count(value: float) -> str:
    """Three digits: 2.29 M, 151 K, 64."""
    return _scaled(value, ((1e9, " G"), (1e6, " M"), (1e3, " K"), (1, "")))


def counted(number: int, what: str) -> str:
    """1 step, 3 steps."""
    return f"{number:,} {what}" if number == 1 else f"{number:,} {what}s"


def in_bytes(value: float) -> str:
    return _scaled(value, ((1e9, " GB"), (1e6, " MB"), (1e3, " kB"), (1, " bytes")))


def _scaled(value: float, units: tuple[tuple[float, str], ...]) -> str:
    # 999,600 reads 1.00 M, not 1000 K: the unit is chosen for the rounded number.
    scale, unit = next((u for u in units if abs(value) >= 0.9995 * u[0]), units[-1])
    return digits(value / scale, whole=scale == 1) + unit


def digits(value: float, whole: bool = False) -> str:
    """Three significant digits without an exponent; counts below 1,000 have no decimals."""
    if whole and value == round(value):
        return f"{value:.0f}"
    size = abs(value)
    decimals = 0 if size >= 99.95 else 1 if size >= 9.995 else 2 if size >= 0.9995 else 3
    return f"{value:.{decimals}f}"


def percent(value: float) -> str:
    return f"{100 * value:.2f} %"


def milliseconds(value: float) -> str:
    return f"{digits(value)} ms"


def power(value: float | None) -> str:
    """3e-14; an exact 0 is said as such."""
    return "?" if value is None else "0" if value == 0 else scientific(value, 0)


def scientific(value: float, decimals: int = 1) -> str:
    """2.1e-6, without Python's zero in the exponent."""
    return re.sub(r"e([+-])0", r"e\1", f"{value:.{decimals}e}")


def times(before: float | None, after: float | None, less: str, more: str) -> str:
    """`15.2x fewer`, or nothing where a side is missing or zero."""
    if not before or not after or before < 0 or after < 0:
        return ""
    ratio = before / after
    if f"{ratio:.2f}" == "1.00":
        return "the same"
    return f"{digits(ratio)}x {less}" if ratio > 1 else f"{digits(1 / ratio)}x {more}"


def in_points(before: float | None, after: float | None, *_: str) -> str:
    """Difference of two fractions in percentage points; no minus sign on a zero."""
    return "" if before is None or after is None else f"{round(100 * (after - before), 2) + 0.0:+.2f} points"
