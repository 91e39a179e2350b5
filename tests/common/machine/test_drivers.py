"""The drivers of NVIDIA and Ascend, as they are found without torch."""

from common.machine import drivers


def test_the_driver_is_known_where_its_library_is_missing(tmp_path, monkeypatch):
    monkeypatch.setattr(drivers, "_nvml", lambda: None)
    monkeypatch.setattr(drivers, "NVIDIA", tmp_path / "version")
    assert (drivers.nvidia(), drivers.gpus()) == (None, 0)
    drivers.NVIDIA.write_text("550.54\n")
    assert (drivers.nvidia(), drivers.gpus()) == ("550.54", 0)
