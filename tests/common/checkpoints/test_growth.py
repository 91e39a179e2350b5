"""What does not grow with the starts of a run, counted. What one more rank asks: test_barrier.py. Long tables: make bench."""

from collections import Counter

from tests.benchmarks.growth import asked_by


def test_a_run_in_a_bucket_is_found_in_as_many_requests_however_often_it_was_started(store, tmp_path):
    store.client().create_bucket(Bucket="runs")
    starts = [asked_by(store, tmp_path / str(number), 3 * number) for number in range(1, 5)]
    found = [Counter(asked[: asked.index("PUT")]) for asked in starts]  # until it writes something
    assert found[1] == found[3] and found[1]["GET"] > 0 and found[1]["LIST"] > 0
