"""The table of faults that other servers had: its data, the tests' marks, and the document."""

from pathlib import Path

import pytest

from tests.support.field_reports import (
    AREAS,
    DOCUMENT,
    Report,
    Shown,
    document,
    read_reports,
    shown_by_tests,
)

NUM_REPORTS = 127


def test_every_report_is_there_with_what_happens_here() -> None:
    reports = read_reports()
    assert len(reports) == NUM_REPORTS and list(reports) == sorted(reports)
    for name, report in reports.items():
        assert name[0] in AREAS and report.kind, name
        assert bool(report.outcome) != bool(report.cannot_arise), f"{name}: exactly one of both"


def test_tests_name_reports_that_exist_and_can_arise() -> None:
    reports = read_reports()
    for one in shown_by_tests():
        assert one.report in reports, f"{one.file}::{one.test} names {one.report}"
        assert reports[one.report].outcome, f"{one.file}::{one.test}: {one.report} cannot arise"


def test_every_report_is_shown_by_a_test_or_cannot_arise() -> None:
    shown = {one.report for one in shown_by_tests()}
    assert not [
        name
        for name, report in read_reports().items()
        if not report.cannot_arise and name not in shown
    ]


def test_the_document_is_what_the_tests_say() -> None:
    written = document(read_reports(), shown_by_tests())
    assert DOCUMENT.read_text() == written, "make field-reports writes it anew"


def test_reports_are_found_in_names_and_in_markers(tmp_path: Path) -> None:
    (tmp_path / "test_some.py").write_text(
        "import pytest\n"
        "def test_a04_b12_both_at_once(): ...\n"
        "@pytest.mark.field_report('C01', ('D02', 'D03'))\n"
        "async def test_marked(): ...\n"
        "@pytest.mark.slow\n"
        "def test_neither_a04_nor_a_marker(): ...\n"
        "class TestClass:\n"
        "    @pytest.mark.field_report('E01')\n"
        "    def test_e01_twice_is_once(self): ...\n"
    )
    assert [(one.test, one.report) for one in shown_by_tests(tmp_path)] == [
        ("test_a04_b12_both_at_once", "A04"),
        ("test_a04_b12_both_at_once", "B12"),
        ("test_marked", "C01"),
        ("test_marked", "D02"),
        ("test_marked", "D03"),
        ("test_e01_twice_is_once", "E01"),
    ]


@pytest.mark.parametrize("line", ["kind = 'k'\nreason = 'misspelt'", "outcome = 'no kind'"])
def test_a_key_that_is_not_there_or_is_missing_is_an_error(tmp_path: Path, line: str) -> None:
    path = tmp_path / "reports.toml"
    path.write_text(f"[A01]\n{line}\n")
    with pytest.raises(TypeError):
        read_reports(path)


def test_the_document_has_a_row_for_each_report_with_its_tests_by_file() -> None:
    reports = {"A01": Report("lost", "found"), "H01": Report("old", cannot_arise="it is new")}
    shown = [Shown("A01", "a.py", "test_x"), Shown("A01", "a.py", "test_y")]
    text = document(reports, shown)
    assert "| A01 | lost | found | a.py: `test_x`, `test_y` |\n" in text
    assert "| H01 | old | cannot arise: it is new |  |\n" in text
