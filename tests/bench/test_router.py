"""The router's own benchmark runs and reports what it promises."""

from jpd.bench.router import FLEET_SIZES, TARGET_FLEET, run


def test_decisions_are_measured_for_every_fleet_size() -> None:
    results = {result.name: result for result in run(num_decisions=300)}
    for num_workers in FLEET_SIZES:
        assert results[f"decision p50, {num_workers} workers"].value > 0.0
    promised = [result for result in results.values() if result.target is not None]
    assert len(promised) == 3
    assert all(str(TARGET_FLEET) in result.name for result in promised)
