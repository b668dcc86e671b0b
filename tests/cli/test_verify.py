from __future__ import annotations

import json
import re
import struct
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlkit.envs.discovery.problem import PUBLISHED, Construction, VerifiedConstruction, load_published
from rlkit.envs.discovery.problems.erdos import Erdos
from rlkit.envs.discovery.problems.packing import CirclePacking
from rlkit.envs.discovery.verification import verify_witness
from tests.envs.discovery.test_archive import Number

HAUGLAND = PUBLISHED / "erdos_haugland_2016.json"


def write(path: Path, content: object) -> Path:
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def test_a_published_construction_is_verified_compared_and_drawn(rlkit: Callable[..., Any], tmp_path: Path) -> None:
    result = rlkit("verify", "erdos", HAUGLAND, "--draw", tmp_path / "h.png")
    assert result.exit_code == 0, result.stderr
    lines = result.stdout.splitlines()
    assert lines[:3] == [
        "C5 = 0.380926853433087, 51 float64 values",
        "certificate: C5 <= 0.3809268535, proven exactly for the step function of these 51 heights",
        "exactly: 0.380926853433086980, rounded up",
    ]
    assert lines[3].startswith("normalisation: rescaled by 1+1.29e-17 to the sum n / 2, moved towards 1/2 by")
    assert lines[4] == "equals: Haugland 0.380927"
    assert "misses: rlkit, from MILO's construction 0.3808563308462765 by 7.05e-05" in lines[5]
    assert (tmp_path / "h.png").read_bytes().startswith(b"\x89PNG")


def test_a_drawing_lies_beside_the_file(rlkit: Callable[..., Any], tmp_path: Path) -> None:
    path = write(tmp_path / "flat.json", [0.5] * 4)
    assert rlkit("verify", "erdos", path, "--no-draw").exit_code == 0
    assert [*tmp_path.glob("*.png")] == []
    output = json.loads(rlkit("verify", "erdos", path, "--json").stdout)
    assert (output["ok"], output["value"], output["picture"]) == (True, 0.5, f"{path}.png")
    assert (tmp_path / "flat.json.png").exists()


def test_a_drawing_that_cannot_be_written_is_a_note(rlkit: Callable[..., Any], tmp_path: Path) -> None:
    path = write(tmp_path / "flat.json", [0.5] * 4)
    result = rlkit("verify", "erdos", path, "--draw", path / "x.png")
    assert (result.exit_code, result.stderr.startswith("not drawn: ")) == (0, True)


@pytest.mark.parametrize("write_file", ["json", "object", "solution", "npy", "column", "row", "f8"])
def test_each_format_is_read(write_file: str, tmp_path: Path) -> None:
    h = load_published("erdos_haugland_2016")
    path = tmp_path / {"npy": "h.npy", "column": "h.csv", "row": "h.CSV", "f8": "h.npy"}.get(write_file, "h.json")
    match write_file:
        case "npy" | "f8":
            np.save(path, h)
        case "column":
            path.write_text("\n".join(map(repr, h.tolist())))
        case "row":
            path.write_text(", ".join(map(repr, h.tolist())) + "\n")
        case _:
            forms: dict[str, object] = {
                "json": h.tolist(),
                "object": {"h_values": h.tolist(), "n": 51},
                "solution": {"problem_id": 1, "solution": {"values": h.tolist()}},
            }
            write(path, forms[write_file])
    assert verify_witness("erdos", path).exact == Erdos().compute_exactly(h)[0]


def test_circles_are_read_from_rows(tmp_path: Path) -> None:
    circles = load_published("circle_packing_26_alphaevolve_2025")
    for path in (tmp_path / "c.csv", tmp_path / "c.json"):
        text = "\n".join(";".join(map(repr, row)) for row in circles.tolist())
        write(path, text if path.suffix == ".csv" else {"circles": circles.tolist()})
        verification = verify_witness("circle_packing", path)
        assert verification.decimals.startswith("2.63586275")
        assert verification.normalisation == ""


def test_integers_over_a_power_of_two_are_exact(rlkit: Callable[..., Any], tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    half = [int(part) for part in rng.integers(1 << 59, 1 << 60, 64)]
    a = [value for part in half for value in (part + 1, (1 << 60) - part - 1)]  # no float64 has all of these digits
    path = write(tmp_path / "a.json", {"n": 128, "D_log2": 60, "a": a})
    exact = [Fraction(value, 1 << 60) for value in a]
    assert sum(exact) == 64
    overlap = max(sum(exact[i + m] * (1 - exact[i]) for i in range(128) if 0 <= i + m < 128) for m in range(-127, 128))
    verification = verify_witness("erdos", path)
    assert verification.exact == overlap * Fraction(2, 128)
    assert verification.exact != Erdos().compute_exactly(np.array(exact, np.float64))[0]
    assert verification.normalisation == ""
    output = rlkit("verify", "erdos", path, "--no-draw").stdout
    assert "128 exact values" in output
    assert "normalisation: none" in output


def test_rounded_decimals_are_normalised_and_certified(tmp_path: Path) -> None:
    h = load_published("erdos_ttt_discover_2026").round(6)
    h[h > 0.5] -= 1e-6  # so that rescaling raises heights of 1
    verification = verify_witness("erdos", write(tmp_path / "h.json", [*h.tolist()]))
    assert "rescaled by 1+" in verification.normalisation
    assert verification.exact == pytest.approx(0.3808753, abs=1e-6)


def test_many_pieces_are_allowed_in_a_file(tmp_path: Path) -> None:
    h = np.repeat(load_published("erdos_haugland_2016"), 81)
    np.save(tmp_path / "h.npy", h)
    assert verify_witness("erdos", tmp_path / "h.npy").decimals == "0.380926853433086980"


def test_a_claim_from_a_wrong_normalisation_is_refused_with_the_true_value(
    rlkit: Callable[..., Any], tmp_path: Path
) -> None:
    h = np.repeat(Erdos().verify(load_published("erdos_haugland_2016")).construction, 80)  # 4080 pieces
    claim = float(np.correlate(h, 1 - h, mode="full").max() * 2 / (len(h) + 0.9999999999))
    assert claim < 0.38084
    result = rlkit("verify", "erdos", write(tmp_path / "h.json", {"values": h.tolist(), "score": claim}), "--no-draw")
    assert result.exit_code == 1
    assert f"claimed as score: {claim}" in result.stdout
    (line,) = result.stderr.splitlines()
    assert f"score claims {claim}, which is wrong: C5 is 0.380926853433" in line


@pytest.mark.parametrize(
    ("claim", "is_right"),
    [
        ("0.380926853433087", True),
        (0.380927, True),
        ("0.38092686", True),
        ("0.3809268", True),
        ("0.38092", True),
        ("0.380924", False),
        ("0.381", True),
        ("0.39", False),
        (0, False),
        (1, False),
        ("-0.380927", False),
        (float("nan"), False),
        ("1e999999", False),
        ("1e9999999999999999999999", False),
        ("0e999999", False),
    ],
)
def test_a_claim_is_right_to_its_last_digit(claim: object, is_right: bool, tmp_path: Path) -> None:
    h = load_published("erdos_haugland_2016").tolist()
    verification = verify_witness("erdos", write(tmp_path / "h.json", {"values": h, "c5": claim}))
    assert (verification.wrong_claims == {}) == is_right


def test_a_claim_that_is_no_number_is_ignored(tmp_path: Path) -> None:
    for claim in ("pending", None, [1], True, "0.1\ncertificate: C5 <= 0.1", "0.1\x1b[8m"):
        path = write(tmp_path / "h.json", {"values": [0.5, 0.5], "score": claim})
        assert not verify_witness("erdos", path).claims


HOSTILE: dict[str, tuple[object, int, str]] = {
    "empty": ([], 1, "0 values"),
    "nan": ("[NaN, 1.0]", 1, "not finite"),
    "infinity": ("[Infinity, 1.0]", 1, "not finite"),
    "1e308": ([1e308, 1e308], 1, r"a height is 1e\+308"),
    "huge integer": ([10**400, 1], 1, "too large for float64"),
    "denormals": ([5e-324] * 4, 1, "sum to"),
    "zeros": ([0.0, -0.0], 1, "sum to 0"),
    "negative": ([-0.5, 1.0], 1, "a height is -0.5"),
    "negative integers": ({"a": [-(1 << 60), 1 << 60], "D_log2": 60}, 1, "a height is -1"),
    "wrong sum": ([1.0, 1.0, 0.5, 0.0, 0.0, 0.0], 1, "after rescaling"),
    "million": ("[" + "1," * 999_999 + "0]", 1, "1000000 values"),
    "nested": ([[0.5, 0.5], [0.5, 0.5]], 1, "2 dimensions"),
    "ragged": ([[0.5], [0.5, 0.5]], 2, "among its numbers"),
    "deep": ("[" * 100_000, 2, "cannot be read"),
    "texts": (["0.5", "0.5"], 2, "'0.5' among its numbers"),
    "mixed": ([0.5, [0.5]], 2, "among its numbers"),
    "booleans": ([True, False], 2, "'True' among its numbers"),
    "no list": ({"n": 3}, 2, "no list of numbers"),
    "number": ("3", 2, "no list of numbers"),
    "exponent": ({"a": [1, 2], "D_log2": 10**9}, 2, "D_log2 must be"),
    "negative exponent": ({"a": [1, 2], "D_log2": -1}, 2, "D_log2 must be"),
    "floats over a power": ({"a": [0.5, 2], "D_log2": 3}, 2, "'0.5' among its integers"),
    "long integer": ("[" + "9" * 10_000 + "]", 2, "cannot be read"),
    "not json": ("\x89PNG\r\n\x1a\n", 2, "cannot be read"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_file_is_one_line(name: str, rlkit: Callable[..., Any], tmp_path: Path) -> None:
    content, exit_code, why = HOSTILE[name]
    result = rlkit("verify", "erdos", write(tmp_path / "h.json", content), "--no-draw")
    assert result.exit_code == exit_code, result.stderr
    (line,) = result.stderr.splitlines()
    assert line.startswith(f"error: {tmp_path / 'h.json'}: " if exit_code == 2 else "error: ")
    assert len(line) < len(str(tmp_path)) + 300
    assert re.search(why, line)
    assert result.stdout == ""


def test_negative_zeros_and_denormals_among_heights_are_exact(tmp_path: Path) -> None:
    path = write(tmp_path / "h.json", [-0.0, 5e-324, 1.0, 1.0])
    verification = verify_witness("erdos", path)
    assert verification.exact == Erdos().compute_exactly([Fraction(0), Fraction(5e-324), Fraction(1), Fraction(1)])[0]


def test_an_exponent_of_two_thousand_is_certified(rlkit: Callable[..., Any], tmp_path: Path) -> None:
    unit = 1 << 2048
    path = write(tmp_path / "h.json", {"a": [-1, unit // 3, unit, unit - 7], "D_log2": 2048})
    assert "moved towards 1/2" in rlkit("verify", "erdos", path, "--no-draw").stdout


def test_numbers_too_long_for_exact_arithmetic_are_certified_as_floats(tmp_path: Path) -> None:
    half = 1 << 2047
    heights = [half + (half >> 9) + 1, *[half] * 8191]  # one odd numerator of 2048 bits, times 8192 numbers
    verification = verify_witness("erdos", write(tmp_path / "h.json", {"a": heights, "D_log2": 2048}))
    assert verification.normalisation == "the verifier changed numbers by up to 1.19e-07"  # it rescaled them
    certificate = Erdos(max_points=8192).certificate(verification.construction)
    assert verification.certificate == certificate
    assert verification.exact == Fraction(certificate.exact)
    assert verification.numbers == "8192 exact values"


def test_a_change_of_numbers_too_long_for_exact_arithmetic_is_stated_below_the_precision_of_floats(
    tmp_path: Path,
) -> None:
    path = write(tmp_path / "f.json", {"a": [-1, *[1 << 2048] * 8192], "D_log2": 2048})  # the first becomes -0
    normalisation = verify_witness("autocorrelation_1", path).normalisation
    assert normalisation == "the verifier changed numbers by up to 3.09e-617"


def test_files_that_are_no_arrays_are_one_line(rlkit: Callable[..., Any], tmp_path: Path) -> None:
    np.save(tmp_path / "pickle.npy", np.array([{"a": 1}], object), allow_pickle=True)
    np.save(tmp_path / "complex.npy", np.array([1j]))
    header = b"{'descr': '<f8', 'fortran_order': False, 'shape': (1000000000000000,), }"
    (tmp_path / "huge.npy").write_bytes(b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header)
    (tmp_path / "short.npy").write_bytes(b"\x93NUMPY")
    (tmp_path / "words.csv").write_text("a,b\n1,2\n")
    (tmp_path / "folder.json").mkdir()
    with (tmp_path / "large.json").open("wb") as file:
        file.truncate(1 << 30)
    names = {
        "pickle.npy": "allow_pickle",
        "complex.npy": "among its numbers",
        "huge.npy": "cannot be read",
        "short.npy": "cannot be read",
        "words.csv": "could not convert",
        "folder.json": "there is no such file",
        "missing.json": "there is no such file",
        "large.json": "more than 32 MiB",
        "h.txt": "there is no such file",
    }
    for name, why in names.items():
        result = rlkit("verify", "erdos", tmp_path / name)
        (line,) = result.stderr.splitlines()
        assert (result.exit_code, why in line) == (2, True), line


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (("erdoes", "h.json"), "Did you mean 'erdos'"),
        (("erdos", "h.json", "--option", "circles=3"), "options.circles: unknown argument"),
        (("circle_packing", "h.json", "--option", "circles=0"), "error: options.circles: expected at least 1"),
        (("circle_packing", "h.json", "--option", "circles=22500"), "error: options.circles: expected at most 5000"),
        (("circle_packing", "h.json", "--option", "circles=["), "error: command line: options.circles: not valid YAML"),
        (
            ("erdos", "h.json", "--option", "slack"),
            "--option: 'slack' is not of the form KEY=VALUE, such as circles=32",
        ),
        (("erdos", "h.json", "--draw", "x.png", "--no-draw"), "--draw: has no effect"),
        (("erdos", HAUGLAND, "--draw", "/"), "--draw: / is not a file"),
        (("rlkit.envs.discovery.problem:Problem", "h.json"), "lacks the methods start, statement, verify; define them"),
    ],
)
def test_wrong_usage_is_one_line(arguments: tuple[str | Path, ...], why: str, rlkit: Callable[..., Any]) -> None:
    result = rlkit("verify", *arguments)
    assert (result.exit_code, why in result.stderr) == (2, True), result.stderr


def test_options_choose_the_problem(rlkit: Callable[..., Any], tmp_path: Path) -> None:
    path = write(tmp_path / "c.json", [[0.25, 0.5, 0.25], [0.75, 0.5, 0.25]])
    output = json.loads(rlkit("verify", "circle_packing", path, "--option", "circles=2", "--json").stdout)
    assert output["exact"] == "0.500000000000000000"
    options = ("--option", "circles=2", "--option", "region=circle", "--draw", tmp_path / "c.png")
    path = write(tmp_path / "d.json", [[-0.5, 0, 0.5], [0.5, 0, 0.5]])
    output = json.loads(rlkit("verify", "circle_packing", path, *options, "--json").stdout)
    assert (output["exact"], output["picture"]) == ("1.000000000000000000", str(tmp_path / "c.png"))
    limited = rlkit("verify", "erdos", write(tmp_path / "h.json", [0.5] * 9), "--option", "max_points=8")
    assert (limited.exit_code, "9 values, and must have 2 to 8" in limited.stderr) == (1, True)


def test_rational_circles_may_touch_although_their_float64_values_overlap(tmp_path: Path) -> None:
    unit = 1 << 80
    quarter, step = unit // 4, 12345678901  # 2^-80 · step is below the precision of float64
    a = [[quarter, unit // 2, quarter - step], [3 * quarter, unit // 2, quarter + step]]
    path = write(tmp_path / "c.json", {"a": a, "D_log2": 80})
    verification = verify_witness(CirclePacking(2), path)
    assert verification.exact == Fraction(1, 2) - 2 * Fraction(1e-12)  # the right circle leaves the square
    assert verification.normalisation == "radii reduced by 1e-12"


@dataclass(frozen=True)
class Sum(Number):
    """A problem whose values may be negative, with a construction of any length."""

    def verify(self, construction: Construction) -> VerifiedConstruction:
        return VerifiedConstruction(construction, float(construction.sum()))


def test_values_below_0_and_empty_constructions_of_a_problem_of_ones_own_are_verified(tmp_path: Path) -> None:
    assert verify_witness(Sum(), write(tmp_path / "s.json", [-0.25])).decimals == "-0.250000000000000000"
    assert verify_witness(Sum(), write(tmp_path / "s.json", [])).decimals == "0.000000000000000000"


def test_a_file_of_another_kind_is_refused(rlkit: Callable[..., Any], tmp_path: Path) -> None:
    result = rlkit("verify", "erdos", write(tmp_path / "h.txt", "0.5"))
    assert (result.exit_code, "it must be a .json, .npy or .csv file" in result.stderr) == (2, True)
