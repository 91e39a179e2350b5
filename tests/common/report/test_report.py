"""report.html and what it is made of: the numbers are those of the files, nothing in a file is run, and any run has its page."""

import errno
import html.parser
import json
import re
import threading

import pytest
import torch

from common import job, moments, progress, report
from common.checkpoints.position import Position
from common.report import left, page
from common.run import clock, scores, side_files
from common.run.observers.journal import Journal
from common.run.observers.report import Report
from datasets.loader import torch_batches
from datasets.packs.state import ARRIVED_COLUMNS
from datasets.sampler import InOrder
from launch.report import main
from tests.tools import observed
from tests.tools.jobs import FIGURES, ROOT, TINY, Popen, command, environment, run_forked, run_job, wait_for
from tests.tools.ranks import processes_of
from tests.tools.runs import TIME, ended, lines, made_up
from tests.tools.stores import MIB, remote_names, store_environment

HOSTILE = ["<script>alert(1)</script>", "\"' onerror=alert(1) x='", "שלום עולם", "n" * 300, "{{ 7 * 7 }}", "&lt;b&gt;", "a\nb"]


class Parsed(html.parser.HTMLParser):
    """The tags of a page, its text in English or Chinese, and the tables below each id."""

    def __init__(self, text, other="zh"):
        super().__init__()
        self.tags, self.words, self.tables, self._places, self._spans, self._other = [], [], {}, [], [], other
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        given = dict(attributes)
        self.tags.append((tag, given))
        if tag == "span":
            self._spans.append(given.get("lang"))
        if "id" in given and tag in ("section", "figure"):
            self._places.append((tag, given["id"]))
        if tag == "tr" and self._places:
            self.tables.setdefault(self._places[-1][1], []).append([])
        if tag in ("td", "th") and self._rows():
            self._rows()[-1].append("")

    def handle_endtag(self, tag):
        if tag in ("td", "th") and self._rows() and self._rows()[-1]:
            self._rows()[-1][-1] = self._rows()[-1][-1].strip()
        if tag == "span":
            self._spans.pop()
        if self._places and tag == self._places[-1][0]:
            self._places.pop()

    def _rows(self):
        return self.tables.get(self._places[-1][1]) if self._places else None

    def handle_data(self, data):
        if self._other in self._spans:
            return
        self.words.append(data)
        if self._rows() and self._rows()[-1] and data.strip():
            self._rows()[-1][-1] += data

    def text(self):
        return re.sub(r"\s+", " ", "".join(self.words))


def shown(folder):
    return Parsed(report.of_one(report.RunFiles.read(str(folder))))


# --- What a job leaves -------------------------------------------------------------------------------------------------


def test_a_job_writes_its_report_and_the_numbers_are_those_of_its_files(finished):
    out = finished[0] / "out"
    parsed = Parsed((out / "report.html").read_text())
    epochs = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    found = [row for row in parsed.tables["train_loss"] if row[0].isdigit()]
    assert found == [
        [str(row["epoch"]), f"{row['samples']:,}", f"{row['train_loss']:.6g}", f"{row['loss']:.6g}"] for row in epochs
    ]
    best = max(epochs, key=lambda row: row["accuracy"])
    assert f"Best accuracy {best['accuracy']:.4f}, in epoch {best['epoch']}" in parsed.text()
    assert "Finished after 2/2 epochs" in parsed.text() and "the images are synthetic" in parsed.text()
    said = json.loads((out / "report.json").read_text())
    cells = {(row["class"], column): 0 for row in said["classes"] for column in range(10)}
    cells.update({(said["classes"][true]["class"], given): count for true, given, count in said["confusion"]})
    matrix = {row[0]: row[1:] for row in parsed.tables["confusion"][1:]}
    assert {
        (name, place): int(cell.replace("·", "0")) for name, row in matrix.items() for place, cell in enumerate(row)
    } == cells
    text = (out / "report.txt").read_text()
    for row in said["classes"]:
        assert re.search(
            rf"{row['class']} +{row['precision']:.4f} +{row['recall']:.4f} +{row['f1']:.4f} +{row['samples']}\.0\n", text
        )
    images = [attributes["alt"] for tag, attributes in parsed.tags if tag == "img"]
    mistakes = [one for kind in ("worst", "surest") for one in said["mistakes"][kind]]
    assert (
        images == [f"#{one['id']}: {one['class']} → {one['predicted']}" for one in mistakes] and len(images) == 2 * scores.SHOWN
    )
    assert len((out / "report.html").read_bytes()) < 2 * MIB


def test_the_rows_of_speed_add_up_to_the_run(finished):
    rows = [json.loads(line) for line in (finished[0] / "out" / "speed.jsonl").read_text().splitlines()]
    assert sum(row["images"] for row in rows) == 128 and {row["epoch"] for row in rows} == {1, 2}
    assert len({tuple(row) for row in rows}) == 1, "every row has the same columns"
    ends = [row for row in rows if row["loss"] is None]  # of both epochs, and of the last save
    assert [row["evaluation"] > 0 for row in ends] == [True, True, False] and [row["epoch"] for row in ends] == [1, 2, 2]
    for row in [row for row in rows if row["images"]]:
        training = row["waiting_for_data"] + row["transfer"] + row["compute"]
        assert row["images_per_s"] == pytest.approx(row["images"] / training, rel=0.02) and row["peak_memory_mib"] > 100
    assert clock.PHASES == page.PHASES and set(clock.PHASE_OF_HEARTBEAT.values()) < set(clock.PHASES)
    assert (scores.SHOWN, scores.SIDE) == (page.SQUARES_PER_ROW, page.SQUARE_SIDE)


def test_the_journal_tells_of_every_start_and_how_it_ended(tmp_path):
    run_job("train", tmp_path, *TINY, "--max_steps", 5, "--lr", "0.01", env={"HF_TOKEN": "s3cr3t"})
    run_job("train", tmp_path, *TINY, "--lr", "0.01")
    rows = [json.loads(line) for line in (tmp_path / "out" / "journal.jsonl").read_text().splitlines()]
    told = [(row["event"], row.get("how"), row.get("samples")) for row in rows if row["event"] != "warning"]
    assert told == [("start", None, 0), ("end", "limit", 80), ("start", None, 80), ("end", "finished", 128)]
    first, second = (row for row in rows if row["event"] == "start")
    assert (
        first["options"]["max_steps"] == ["5", "None"]
        and first["options"]["lr"] == ["0.01", "0.1"]
        and "seed" not in first["options"]
    )
    assert "--max_steps" not in second["options"] and second["goes_on_from"].endswith("000000000080.pt")
    assert (
        first["command"].startswith(f"python {ROOT}/jobs/train.py --custom_data true")
        and "--max_steps 5 --lr 0.01" in first["command"]
    )
    parsed = shown(tmp_path / "out")
    assert [row[2] for row in parsed.tables["events"][1:]] == [
        "start (1 rank)", "limit: --max_steps 5", "restart, going on from 000000000080.pt (1 rank)", "finished: --epochs 2",
        *[row[2] for row in parsed.tables["events"][5:]],
    ]  # fmt: skip


def test_a_run_that_was_killed_has_its_page_too(tmp_path):
    with Popen(command("train", *TINY, "--epochs", 500, "--output_dir", tmp_path / "out"), env=environment()) as job_:
        wait_for(lambda: (tmp_path / "out" / "metrics.jsonl").exists(), job_, "its first epoch")
        job_.kill()
    wait_for(lambda: not processes_of(tmp_path), None, "the end of its watcher")
    journal = tmp_path / "out" / "journal.jsonl"  # as if the watcher were lost with it
    journal.write_text("".join(line for line in journal.open() if json.loads(line)["event"] != "end"))
    assert main([str(tmp_path / "out")]) == 0
    text = Parsed((tmp_path / "out" / "report.html").read_text()).text()
    assert "no end was recorded: it still runs, or was killed after 20" in text and "To go on:" in text


def test_a_page_that_cannot_be_made_ends_no_run(monkeypatch, capsys):
    monkeypatch.setattr(report, "of_one", lambda left: 1 / 0)
    monkeypatch.setattr(report.RunFiles, "read", lambda folder: None)
    job._ReportWriter().written("nowhere", lambda *file: pytest.fail("nothing was made"))
    assert "warning: report.html could not be made: ZeroDivisionError" in capsys.readouterr().out


class Warns(torch.utils.data.Dataset):
    def __len__(self):
        return 2

    def __getitem__(self, epoch_and_ids):
        progress.warn(f"sample {epoch_and_ids[1][0]}")
        return torch.zeros(1), torch.zeros(1), torch.zeros(1)


def journal_of(folder, begun=True):
    """That hears the lines of the log, as the observers of a run do."""
    told = observed.observer(Journal, folder)
    moments.listen(type("Hears", (), {"said": lambda _, text: told.logged(None, text)})())
    if begun:
        told.began(observed.facts(folder), about={})
    return told


def test_a_warning_of_a_loader_process_is_in_the_journal(tmp_path):
    journal_of(tmp_path)
    assert len(list(torch_batches(Warns(), InOrder(2, 1), workers=1))) == 2
    rows = [json.loads(line) for line in (tmp_path / "journal.jsonl").read_text().splitlines()]
    assert [row["text"] for row in rows if row["event"] == "warning"] == ["sample 0", "sample 1"]


def test_what_cannot_be_written_is_said_once_and_written_later_whoever_warns(tmp_path, capsys, monkeypatch):
    """The warning of a file that cannot be written is a line of the journal, which cannot be written."""
    told, facts = journal_of(tmp_path), observed.facts(tmp_path)
    with monkeypatch.context() as full:
        full.setattr(side_files, "append", lambda *_: (_ for _ in ()).throw(OSError(errno.ENOSPC, "No space left on device")))
        told.log_due(facts, **observed.LINE)
    said = capsys.readouterr().out
    assert said.count("speed.jsonl cannot be written") == said.count("journal.jsonl cannot be written") == 1
    threads = [threading.Thread(target=lambda: [progress.say("warning: again") for _ in range(200)]) for _ in range(4)]
    for thread in threads:
        thread.start()
    for _ in range(200):
        told.log_due(facts, **observed.LINE)
    for thread in threads:
        thread.join()
    rows = [json.loads(line) for line in (tmp_path / "journal.jsonl").read_text().splitlines()]
    assert [row.get("text") for row in rows].count("again") == 800
    assert len((tmp_path / "speed.jsonl").read_text().splitlines()) == 201


def test_warnings_before_the_folder_is_known_are_kept(tmp_path):
    told = journal_of(tmp_path, begun=False)
    moments.announce("said", "warning: before the folder is known")
    assert not list(tmp_path.iterdir()), "it may still be that of another run"
    told.began(observed.facts(tmp_path), about={})
    moments.announce("said", "epoch=1/2")
    moments.announce("said", "advice: more workers")
    rows = [json.loads(line) for line in (tmp_path / "journal.jsonl").read_text().splitlines()]
    assert [row.get("text") for row in rows] == ["before the folder is known", None, "more workers"]


def test_a_thousand_classes_have_their_confusions_in_place_of_a_matrix(tmp_path):
    names = [f"class number {number}" for number in range(1000)]
    counted = scores.Scores(names, torch.device("cpu"))
    labels = torch.arange(1000).repeat(3)
    given = labels.clone()
    given[:7] = 500
    counted.add(torch.nn.functional.one_hot(given, 1000).float(), labels, torch.arange(3000))
    told, over = observed.observer(Report, tmp_path), Position(samples_seen=2560, total_steps=20, epoch=2)
    told.epoch_ended(observed.facts(tmp_path, over), **{**observed.EPOCH, "scores": counted.all_reduce()})
    told.ended(observed.facts(tmp_path, over))
    text = (tmp_path / "report.txt").read_text()
    assert "The 7 most frequent confusions" in text and "     1  class number 3 -> class number 500" in text
    assert [row[:2] for row in counted.confused(30)] == [(f"class number {number}", "class number 500") for number in range(7)]
    assert [row[0] for row in shown(tmp_path).tables["confused"][1:]] == [f"class number {number}" for number in range(7)]


# --- Any run -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "event, words",
    [
        (ended(), "Finished after 4/4 epochs. Best accuracy 0.6599"),
        (ended("limit", "--max_steps 7"), "Ended by --max_steps 7 after 4/4 epochs"),
        (ended("stopped", "stopped by SIGTERM"), "Stopped after 4/4 epochs (stopped by SIGTERM); the same command goes on"),
        (ended("failed", "TrainingFailed: the loss is nan"), "Failed after 4/4 epochs: TrainingFailed: the loss is nan"),
        ({"time": TIME + 3, "event": "nodes", "text": "node 1 is lost", "ranks": 3, "pause": 0.7, "samples": 900}, "no end was recorded"),
    ],
)  # fmt: skip
def test_the_first_sentence_says_how_it_ended(tmp_path, event, words):
    whole = report.of_one(report.RunFiles.read(str(made_up(tmp_path / "run", event=[event]))))
    text = Parsed(whole).text()
    assert words in text and "0:03:20 on 2 × cuda:0 (NVIDIA H200)" in text
    assert ("To go on:" in text) is (event.get("how") != "finished")
    assert "python jobs/train.py --epochs 4 --output_dir output_dir/train_again" in text
    chinese = Parsed(whole, other="en").text()
    assert (
        "最佳 accuracy 为 0.6599（第 4 个 epoch），用时 0:03:20，2 × cuda:0 (NVIDIA H200)。" in chinese
        and "Best" not in chinese
    )


def test_steps_that_a_restart_took_again_count_once_in_the_curves(tmp_path):
    again = {"time": TIME + 101, "event": "start", "samples": 500, "ranks": 1, "goes_on_from": "/x/000000000500.pt"}
    found = report.RunFiles.read(str(made_up(tmp_path / "run", epochs=2, event=[again])))
    lines(tmp_path / "run" / "speed.jsonl", [*found.speed, {**found.speed[5], "time": TIME + 3610}])
    lines(tmp_path / "run" / "journal.jsonl", [*found.journal[:2], {**again, "time": TIME + 3600}])
    found = report.RunFiles.read(found.folder)
    assert [row["samples"] for row in found.training_rows()] == [100, 200, 300, 400, 500, 600]
    assert found.seconds() == 110, "from each start to its last sign, not the hour between them"


def test_a_start_that_died_before_its_first_row_went_back_all_the_same(tmp_path):
    folder = made_up(tmp_path / "run", epochs=2, event=[])
    again = {"event": "start", "ranks": 1, "goes_on_from": "/x/000000000500.pt"}
    found = report.RunFiles.read(str(folder))
    more = [{**again, "time": TIME + 3600, "samples": 500}, {**again, "time": TIME + 3700, "samples": 400}]
    lines(folder / "journal.jsonl", [*found.journal[:2], *more])
    assert [row["samples"] for row in report.RunFiles.read(str(folder)).training_rows()] == [100, 200, 300, 400]


def test_nothing_that_a_file_holds_is_run_and_all_of_it_is_shown(tmp_path):
    folder = made_up(tmp_path / "run", names=HOSTILE, event=[ended("failed", HOSTILE[0])], options={name: [name, name] for name in HOSTILE},
                     command=f"python x.py {HOSTILE[0]} {HOSTILE[1]}")  # fmt: skip
    lines(folder / "metrics.jsonl", [{"epoch": 1, "samples": 5, "train_loss": 1.0, HOSTILE[0]: 0.5, "accuracy": 0.5}])
    whole = report.of_one(report.RunFiles.read(str(folder), HOSTILE[0]))
    parsed = Parsed(whole)
    assert [tag for tag, _ in parsed.tags].count("script") == 1
    assert not [
        name
        for _, given in parsed.tags
        for name in given
        if name.startswith("on") or (name == "href" and given[name][0] != "#")
    ]
    assert all(given.get("src", "data:image/jpeg;").startswith("data:image/jpeg;") for _, given in parsed.tags)
    for name in HOSTILE:
        assert re.sub(r"\s+", " ", name.replace("\n", "\\n")) in parsed.text(), name
    policy = next(given["content"] for tag, given in parsed.tags if given.get("http-equiv") == "Content-Security-Policy")
    assert policy.startswith("default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'sha256-")
    assert not re.search(r"(?:https?:)?//(?!www\.w3\.org/)", re.sub(r"base64,[A-Za-z0-9+/=]+", "", whole)), (
        "it asks for nothing"
    )


@pytest.mark.parametrize("name", report.FILES)
@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"[1, 2]\n",
        b"null",
        b'{"time": 1' + b"0" * 400 + b', "event": "start", "samples": 1e300}\n',
        b'{"epoch": [1]',
        b'{"time": -9e10, "event": "end", "how": "failed"}\n',
        b"\xff\x00\n{}\n",
        b'{"epoch": Infinity, "classes": [], "confusion": [[0, 0, Infinity]], "mistakes": {}}',
        b'{"time": 1, "event": "picture", "name": "epoch_1", "rows": null, "columns": ["a", "b", "c"]}\n',
        b'{"classes": [{"class": 1}], "event": "start", "options": 3, "machine": 5, "command": 7, "time": "x", "samples": null, "epoch": 1e999}\n',
    ],
)
def test_a_damaged_file_costs_no_page(tmp_path, name, content):
    folder = made_up(tmp_path / "run", event=[ended()])
    (folder / name).write_bytes(content)
    assert "<main>" in report.of_one(report.RunFiles.read(str(folder)))


@pytest.mark.rehearsal
def test_a_long_run_has_a_small_page(tmp_path):
    folder = made_up(tmp_path / "run", epochs=1000, steps=100, names=[f"class {number}" for number in range(1000)])
    whole = report.of_one(report.RunFiles.read(str(folder)))
    assert len(whole.encode()) < 2 * MIB
    assert [row[0] for row in Parsed(whole).tables["phases"]][1:4] == ["1-17", "18-34", "35-51"]


def test_of_a_very_long_run_rows_are_put_together_and_their_sums_stay(tmp_path, monkeypatch):
    folder = made_up(tmp_path / "run", epochs=3, steps=50)
    whole = report.RunFiles.read(str(folder))
    monkeypatch.setattr(left, "LARGEST_UNJOINED", (folder / "speed.jsonl").stat().st_size // 9)
    few = report.RunFiles.read(str(folder))
    assert (len(whole.speed), len(few.speed)) == (150, 15)
    for name in left.SUMMED:
        assert sum(row.get(name, 0) for row in few.speed) == pytest.approx(sum(row.get(name, 0) for row in whole.speed)), name
    assert Parsed(report.of_one(few)).tables["phases"] == Parsed(report.of_one(whole)).tables["phases"]
    assert set(left.SUMMED) == {"images", *clock.PHASES, *ARRIVED_COLUMNS}


def test_it_says_where_the_data_of_each_epoch_came_from(tmp_path):
    folder = made_up(tmp_path / "run", epochs=3)
    with open(folder / "speed.jsonl", "a") as file:
        for epoch, first, rest, disk in ((1, 2.0, 3.0, 1.5), (1, 1.0, 0, 0), (2, 0, 0, 0), (3, 0, 4.0, 0)):
            came = dict(zip(ARRIVED_COLUMNS, (first, rest, disk)))
            file.write(json.dumps({"epoch": epoch, "waiting_for_storage": 7 * bool(disk), **came}) + "\n")
    rows = Parsed(report.of_one(report.RunFiles.read(str(folder)))).tables["sources"]
    assert [row[:4] for row in rows[1:]] == [["1", "6.0", "3.0", "1.5"], ["3", "4.0", "0.0", "0.0"]]
    assert float(rows[1][4]) >= 7


def test_an_accuracy_of_few_images_has_a_range_and_its_weights_a_name(tmp_path):
    folder = made_up(tmp_path / "run")
    (folder / "epoch_4.pth").touch()
    said = json.loads((folder / "report.json").read_text())
    for samples, range_ in ((93, "With 93 test images it may be anything from 0.56 to 0.75."), (20_000, None)):
        rows = [{**row, "samples": samples if place == 0 else 0} for place, row in enumerate(said["classes"])]
        (folder / "report.json").write_text(json.dumps({**said, "epoch": 3, "classes": rows}))
        text = shown(folder).text()
        assert "Best accuracy 0.6599, in epoch 4, its weights: epoch_4.pth, in" in text and "Each class after epoch 3" in text
        assert range_ in text if range_ else "may be anything" not in text


def test_that_nothing_is_learnt_is_left_out_once_something_is(tmp_path):
    warning = {"time": TIME + 2, "event": "warning", "text": "after 1 of 4 epochs nothing is learnt: an accuracy of 0.3400"}
    folder = made_up(tmp_path / "run", event=[warning])
    assert "nothing is learnt" not in shown(folder).text() and "the images are synthetic" in shown(folder).text()
    scores_of_all = json.loads((folder / "report.json").read_text())
    chance = max(row["samples"] for row in scores_of_all["classes"]) / sum(row["samples"] for row in scores_of_all["classes"])
    lines(folder / "metrics.jsonl", [{"epoch": epoch, "accuracy": chance} for epoch in range(1, 5)])
    assert "nothing is learnt" in shown(folder).text()


def test_mistakes_are_a_table_and_pictures_once(tmp_path):
    folder = made_up(tmp_path / "run")
    said = json.loads((folder / "report.json").read_text())
    shots = said["mistakes"]["worst"]
    said["mistakes"] = {"worst": shots[:9], "surest": shots[8::-1], "all": shots[:9]}
    (folder / "report.json").write_text(json.dumps(said))
    parsed = shown(folder)
    assert len([tag for tag, _ in parsed.tags if tag == "img"]) == 9
    assert parsed.tables["mistakes"][1:] == [[f"#{one['id']}", one["class"], one["predicted"], "90%"] for one in shots[:9]]


def test_the_first_step_of_an_epoch_is_no_fall_of_the_speed(tmp_path):
    folder = made_up(tmp_path / "run", global_batch=100)
    rows = [json.loads(line) for line in (folder / "speed.jsonl").read_text().splitlines()]
    for row in rows:
        row["images"] = 100 if row["steps"] % 5 == 1 else 200
    lines(folder / "speed.jsonl", rows)
    assert len(shown(folder).tables["rate"]) - 1 == sum(row["images"] == 200 for row in rows) < len(rows)


def test_what_cannot_be_of_a_journal_is_no_table_of_pictures(tmp_path):
    whole = {"classes": [["<b>", 80, 20]], "left_out": [["named .gif", 3, "<i>"]]}
    for data in (whole, {**whole, "classes": [["a", "b", "c"]]}, {**whole, "left_out": 7}, [], None):
        parsed = shown(made_up(tmp_path / "run", data=data))
        assert parsed.tables.get("data", [])[1:] == ([["<b>", "80", "20"]] if data is whole else [])


@pytest.mark.parametrize("again", [False, True])
def test_why_a_run_was_killed_is_added_once_and_not_where_it_goes_on(tmp_path, again):
    later = [{"time": TIME + 400, "event": "start", "samples": 500}] if again else []
    folder = made_up(tmp_path / "run", event=later)
    with open(folder / "journal.jsonl", "a") as file:
        file.write('{"time": 3, "ev')  # as the kill has left it
    assert [left.add_end(str(folder), TIME - 1, "rank 1 was killed by SIGKILL") for _ in range(2)] == [not again, False]
    if not again:
        parsed = shown(folder)
        assert "Failed after 4/4 epochs: rank 1 was killed by SIGKILL" in parsed.text()
        assert parsed.tables["events"][-2][1:] == ["2,000", "failed: rank 1 was killed by SIGKILL"]


def test_a_clock_that_goes_back_and_a_start_from_the_beginning(tmp_path):
    again = {"time": TIME - 60, "event": "start", "samples": 0, "ranks": 1, "goes_on_from": None}
    parsed = shown(made_up(tmp_path / "run", event=[again, ended(after=300)]))
    assert "start, from the beginning (1 rank)" in [row[2] for row in parsed.tables["events"]]


def test_the_command_to_start_again_keeps_its_quotes_and_leaves_out_what_is_of_this_run(tmp_path):
    words = "torchrun --nproc_per_node 2 jobs/x.py --output_dir '/data/my runs' --note 'a b' --resume /x/1.pt --overwrite=true"
    text = shown(made_up(tmp_path / "run", command=words)).text()
    assert "torchrun --nproc_per_node 2 jobs/x.py --note 'a b' --output_dir output_dir/train_again" in text


def test_classes_that_no_image_has_are_left_out(tmp_path):
    folder = made_up(tmp_path / "run")
    said = json.loads((folder / "report.json").read_text())
    nobody = [{"class": f"output {number}", "samples": 0, "recall": 0, "precision": 0, "f1": 0} for number in range(100)]
    (folder / "report.json").write_text(json.dumps({**said, "classes": said["classes"] + nobody}))
    parsed = shown(folder)
    assert len(parsed.tables["confusion"]) == 4 and len(parsed.tables["classes"]) == 4


def test_of_a_bucket_it_fetches_what_the_page_needs(store, reachable, tmp_path):
    run_forked(command("train", *TINY, "--train_url", "s3://data/runs/page")[1:], tmp_path, {**store_environment(), **FIGURES})
    there = remote_names(store, "runs/page/")
    assert {"report.html", "report.json", "speed.jsonl", "journal.jsonl", "examples/mistakes.png"} <= set(there)
    assert main(["s3://data/runs/page"]) == 0
    assert "Finished after 2/2 epochs" in Parsed((tmp_path / "report.html").read_text()).text()


def test_where_there_is_no_run_a_sentence_says_so(tmp_path, capsys):
    assert main([str(tmp_path / "nowhere")]) == 2 and main([str(tmp_path)]) == 2
    said = capsys.readouterr().err.splitlines()
    assert said[0] == f"error: {tmp_path}/nowhere does not exist: give the output folder of a job, or its address in a bucket"
    assert said[1] == f"error: {tmp_path.name} holds no run: give the output folder of a job that has trained"


def test_a_page_that_finds_no_room_is_named(tmp_path, monkeypatch, capsys):
    full = OSError(errno.ENOSPC, "No space left on device")  # of a write, which names no file
    monkeypatch.setattr("launch.report.write_atomically", lambda *_: (_ for _ in ()).throw(full))
    assert main([str(made_up(tmp_path / "run", event=[ended()]))]) == 1
    assert capsys.readouterr().err == "error: report.html: No space left on device\n"
