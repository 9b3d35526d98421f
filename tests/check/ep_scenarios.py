"""Every scenario of the kernel family, for `epdsl check tests/check/ep_scenarios.py`."""

from __future__ import annotations

import ep_classes
import ep_family
import ep_modes
import ep_stamped

from epdsl.scenarios import Scenario

for module in (ep_family, ep_classes, ep_modes, ep_stamped):
    globals().update({name: value for name, value in vars(module).items() if isinstance(value, Scenario)})
