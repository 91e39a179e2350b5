"""README.zh.md says what README.md says. A heading, paragraph, table row, command or figure that one of them lacks is named with
its line, and the whole list is printed: it is what the translator still has to do."""

import re
from collections import Counter, namedtuple
from difflib import SequenceMatcher

import pytest

from tests.jobs import ROOT

ENGLISH, CHINESE = "README.md", "README.zh.md"

# A heading, a paragraph, a table row or a line of code. `fixed`: its level, or the code without its comment; `prose`: the pieces to
# translate, which for a row are its cells.
Unit = namedtuple("Unit", "line text kind fixed prose")

COMMENT = re.compile(r"(.*?\S)\s+# (.*)")
TREE = re.compile(r"( *[\w./-]+(?:/|\.py)) {2,}(\S.*)")  # a name in the file tree, and what it is for
UNITS = {"seconds": "s", "秒": "s", "minutes": "min", "分钟": "min", "hours": "h", "小时": "h", "毫秒": "ms"}
SCALES = {"million": 1e6, "万": 1e4, "billion": 1e9, "亿": 1e8}
SAME = ["%", "s", "ms", "min", "h", "KB", "KiB", "MB", "MiB", "GB", "GiB", "dB"]
FIGURE = re.compile(rf"(\d+(?:,\d{{3}})*(?:\.\d+)*)(?:\s?({'|'.join([*UNITS, *SCALES, *SAME])})(?![A-Za-z]))?")


def figure(number, unit):
    number = number.replace(",", "")
    return f"{float(number) * SCALES[unit]:.0f}" if unit in SCALES else f"{number} {UNITS.get(unit, unit)}".strip()


def untouched(prose):
    """What a translation leaves as it is, in whatever order: code, the targets of links, figures with their units."""
    code = re.findall(r"`[^`]+`", prose)
    prose = re.sub(r"`[^`]+`", "", prose)
    links = [target.replace(CHINESE, ENGLISH) for target in re.findall(r"\]\([^)]+\)", prose)]  # each links to the other
    prose = re.sub(r"\]\([^)]+\)", "]", prose)
    return sorted(code + links + [figure(*found) for found in FIGURE.findall(prose)])


def sign(unit):
    """What has to be the same in both."""
    return (unit.kind, unit.fixed, *(tuple(untouched(piece)) for piece in unit.prose))


def units(text):
    found, fence, paragraph = [], False, False
    for number, line in enumerate(text.splitlines(), 1):
        if line.startswith("```") or fence or line.startswith("    "):
            fence ^= line.startswith("```")
            comment = (fence and TREE.fullmatch(line)) or COMMENT.fullmatch(line)
            code, *prose = comment.groups() if comment else [line]
            found.append(Unit(number, line, "code", code, prose))
        elif line.startswith("#"):
            level, title = line.split(" ", 1)
            found.append(Unit(number, line, "heading", level, [title]))
        elif line.startswith("|"):
            found.append(Unit(number, line, "row", "", re.split(r"(?<!\\)\|", line)[1:-1]))
        elif line and paragraph:
            first = found.pop()
            found.append(first._replace(prose=[f"{first.prose[0]} {line}"]))
        elif line:
            found.append(Unit(number, line, "paragraph", "", [line]))
        paragraph = bool(line) and found[-1].kind == "paragraph"
    return found


def shown(unit):
    return unit.text.strip() if len(unit.text) < 100 else unit.text.strip()[:97] + "..."


def place(page, at):
    return f"behind line {page[at - 1].line}" if at else "at the top"


def difference(one, other):
    if len(one.prose) != len(other.prose):
        return f"{len(one.prose)} and {len(other.prose)} {'columns' if one.kind == 'row' else 'comments'}: {shown(one)}"
    first, second = (
        Counter([unit.fixed, *(item for piece in unit.prose for item in untouched(piece))]) for unit in (one, other)
    )
    only = [", ".join((a - b).elements()) or "nothing" for a, b in ((first, second), (second, first))]
    return f"only in the first: {only[0]}; only in the second: {only[1]}; {shown(one)}"


def partings(english, chinese):
    """One line for each place where the two texts part."""
    one, other = units(english), units(chinese)
    said = []
    matcher = SequenceMatcher(None, [sign(unit) for unit in one], [sign(unit) for unit in other], autojunk=False)
    for same, start, stop, begin, end in matcher.get_opcodes():
        if same == "equal":
            continue
        here, there = one[start:stop], other[begin:end]
        if [unit.kind for unit in here] == [unit.kind for unit in there]:
            said += [f"{ENGLISH}:{a.line} and {CHINESE}:{b.line} differ: {difference(a, b)}" for a, b in zip(here, there)]
        else:
            said += [f"{ENGLISH}:{unit.line} is missing in {CHINESE} {place(other, begin)}: {shown(unit)}" for unit in here]
            said += [f"{CHINESE}:{unit.line} is missing in {ENGLISH} {place(one, start)}: {shown(unit)}" for unit in there]
    return said


def untranslated(chinese):
    """Sentences without a Chinese character; names and what programs print are shorter, or code."""
    pieces = [(unit, re.sub(r"`[^`]+`|\([^)]*\)", "", piece)) for unit in units(chinese) for piece in unit.prose]
    return [
        f"{CHINESE}:{unit.line} is not translated: {shown(unit)}"
        for unit, piece in pieces
        if not re.search(r"[\u4e00-\u9fff]", piece) and re.search(r"[a-z]+(?:,? [a-z]+){3}", piece)
    ]


def test_the_chinese_readme_says_what_the_english_one_says():
    english, chinese = ((ROOT / name).read_text(encoding="utf-8") for name in (ENGLISH, CHINESE))
    said = partings(english, chinese) + untranslated(chinese)
    assert not said, "\n" + "\n".join(said)


# A small page with everything that the README has, and what a translator makes of it.
PAGE = """\
# anyrank

[中文](README.zh.md)

It takes 2 minutes for
1.3 million files of 110 KB, see [here](tests/x.md).

## Commands

    make run      # 2 CPU cores
    make test

| job | `cost` |
|---|---|
| `a.py` | 1.27 times |
| `b.py` | every 30 s |

## Tree

```
jobs/             what you upload
  train.py        the base (100 lines)
```

It prints nothing.
"""
TRANSLATED = """\
# anyrank

[English](README.md)

110 KB 的文件共 130 万个，用时 2 分钟，见[这里](tests/x.md)。

## 命令

    make run      # 2 个 CPU 核
    make test

| 作业 | `cost` |
|---|---|
| `a.py` | 1.27 倍 |
| `b.py` | 每 30 秒 |

## 目录

```
jobs/             你上传的东西
  train.py        基础作业（100 行）
```

什么也不输出。
"""


def test_a_translation_is_no_difference():
    assert partings(PAGE, TRANSLATED) + untranslated(TRANSLATED) == []


@pytest.mark.parametrize(
    ("line", "old", "new"),
    [
        pytest.param(8, "## 命令\n", "", id="heading removed"),
        pytest.param(8, "## 命令", "### 命令", id="heading of another level"),
        pytest.param(5, "110 KB 的文件共 130 万个，用时 2 分钟，见[这里](tests/x.md)。\n", "", id="paragraph removed"),
        pytest.param(5, "130 万", "13 万", id="figure of a paragraph changed"),
        pytest.param(5, "2 分钟", "2 秒", id="unit changed"),
        pytest.param(5, "tests/x.md", "tests/y.md", id="link changed"),
        pytest.param(11, "make test", "make tests", id="command changed"),
        pytest.param(10, "      # 2 个 CPU 核", "", id="comment removed"),
        pytest.param(15, "| `a.py` | 1.27 倍 |\n", "", id="row removed"),
        pytest.param(16, "每 30 秒 |", "每 30 秒 | 更多 |", id="column added"),
        pytest.param(16, "每 30 秒", "每 3 秒", id="figure of a row changed"),
        pytest.param(13, "`cost`", "`price`", id="code of a row changed"),
        pytest.param(22, "train.py ", "trains.py", id="name in the tree changed"),
        pytest.param(22, "        基础作业（100 行）", "", id="what a file is for removed"),
        pytest.param(25, "什么也不输出。\n", "", id="last paragraph removed"),
    ],
)
def test_the_line_where_they_part_is_named(line, old, new):
    assert TRANSLATED.count(old) == 1
    said = partings(PAGE, TRANSLATED.replace(old, new))
    assert len(said) == 1 and said[0].startswith(f"{ENGLISH}:{line} "), said


def test_what_only_the_chinese_one_has_is_named():
    assert partings(PAGE, TRANSLATED + "\n多出来的 7 句。\n") == [
        "README.zh.md:26 is missing in README.md behind line 25: 多出来的 7 句。"
    ]


def test_a_sentence_that_was_copied_in_english_is_named():
    copied = TRANSLATED.replace("什么也不输出。", "It prints nothing at all.")
    assert untranslated(copied) == ["README.zh.md:24 is not translated: It prints nothing at all."]
