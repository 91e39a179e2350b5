"""What does not grow with the starts of a run, counted. What one more rank asks: test_barrier.py. Long tables: make bench."""

from tests.benchmarks.growth import asked_by


def test_a_run_in_a_bucket_is_found_in_as_many_requests_however_often_it_was_started(store, tmp_path):
    store.client().create_bucket(Bucket="runs")
    asked = [asked_by(store, tmp_path / str(number), 3 * number) for number in range(1, 5)]
    second, fourth = ({method: counts[method] for method in ("LIST", "GET", "HEAD")} for counts in asked[1::2])
    assert second == fourth and second["GET"] > 0 and second["LIST"] > 0
