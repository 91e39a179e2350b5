"""How many cores a process may use."""

import pytest

from common.machine import cores


@pytest.mark.parametrize(
    "files, allowed",
    [
        ({"cpu.max": "400000 100000\n"}, 4),
        ({"cpu.max": "150000 100000\n"}, 2),
        ({"cpu.max": "max 100000\n"}, None),
        ({"cpu/cpu.cfs_quota_us": "50000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 1),
        ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, None),
        ({}, None),
    ],
)
def test_a_container_may_have_fewer_cores_than_it_sees(files, allowed, tmp_path, monkeypatch):
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert cores.quota(tmp_path) == allowed
    seen = cores.count()
    monkeypatch.setattr(cores, "quota", lambda: allowed)
    assert cores.count() == min(seen, allowed or seen)
