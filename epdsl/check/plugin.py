"""pytest: `@pytest.mark.epcheck(seeds=20, vendors=("nvidia", "amd"), weak=0.3)` on a scenario, or on a test that returns one."""

from __future__ import annotations

from typing import Any

import pytest

_VENDORS = ("nvidia", "amd")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers", "epcheck(seeds, vendors, weak, model): run the scenario the test returns under the checker; a finding fails the test"
    )


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Calls the test; checks the scenario it returned."""
    mark = pyfuncitem.get_closest_marker("epcheck")
    if mark is None:
        return None
    names = pyfuncitem._fixtureinfo.argnames
    scenario = pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in names})
    check_scenario(scenario, **mark.kwargs)
    return True


def check_scenario(
    scenario: Any, seeds: int = 20, vendors: tuple[str, ...] = _VENDORS, weak: float = 0.0, model: str | None = None
) -> None:
    """Fails with the rendered findings when there are any."""
    from epdsl.scenarios import Scenario

    from .engine import Options
    from .explore import explore

    if not isinstance(scenario, Scenario):
        pytest.fail(f"a test marked epcheck returns a scenario (@ep.scenario(ranks=2)), not {type(scenario).__name__}", pytrace=False)
    for vendor in vendors:
        chosen = model or ("ptx" if vendor == "nvidia" else "amdgpu")
        options = Options(vendor=vendor, model=chosen, num_sms=scenario.num_sms)
        rates = (0.0,) if not weak else (0.0, weak)
        report = explore(scenario.function, scenario.ranks, range(seeds), options, weak=rates, name=f"{scenario.file}:{scenario.name}")
        if not report.ok:
            pytest.fail(report.render(), pytrace=False)
