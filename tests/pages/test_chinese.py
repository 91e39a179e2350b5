"""A Chinese page says what its English page says. A heading, paragraph, table row, command or figure that one of them lacks is named
with its line, and the whole list is printed: it is what the translator still has to do."""

import re
from collections import Counter, namedtuple
from difflib import SequenceMatcher

import pytest

from tests.pages.test_docs import slug
from tests.tools.jobs import ROOT

PAGES = ["README.md", "docs/modelarts.md", "docs/from.md"]  # those that have a Chinese one

# A heading, a paragraph or item of a list, a table row or a line of code. `fixed`: its level, or the code without its comment; `prose`: the pieces to
# translate, which for a row are its cells.
Unit = namedtuple("Unit", "line text kind fixed prose")

COMMENT = re.compile(r"(.*?)(?:^|\s+)# (.*)")
TREE = re.compile(r"( *[\w./-]+(?:/|\.py)) {2,}(\S.*)")  # a name in the file tree, and what it is for
UNITS = {"seconds": "s", "秒": "s", "minutes": "min", "分钟": "min", "hours": "h", "小时": "h", "毫秒": "ms"}
SCALES = {"million": 1e6, "万": 1e4, "billion": 1e9, "亿": 1e8}
SAME = ["%", "s", "ms", "min", "h", "KB", "KiB", "MB", "MiB", "GB", "GiB", "dB"]
ITEM = re.compile(r"(\d+\.|-) ")
LINK = re.compile(r"\]\(([^)#]*)#?([^)]*)\)")
HAN = "[\u4e00-\u9fff]"
FIGURE = re.compile(rf"(\d+(?:,\d{{3}})*(?:\.\d+)*)(?:\s?({'|'.join([*UNITS, *SCALES, *SAME])})(?![A-Za-z]))?")


def translation(page):
    return page.replace(".md", ".zh.md")


def read(page):
    return (ROOT / page).read_text(encoding="utf-8")


def figure(number, unit):
    number = number.replace(",", "")
    return f"{float(number) * SCALES[unit]:.0f}" if unit in SCALES else f"{number} {UNITS.get(unit, unit)}".strip()


def untouched(prose):
    """What a translation leaves as it is, in whatever order: code, the targets of links, figures with their units."""
    code = re.findall(r"`[^`]+`", prose)
    prose = re.sub(r"`[^`]+`", "", prose)
    links = [found[0] for found in LINK.finditer(prose)]
    prose = LINK.sub("]", prose)
    return sorted(code + links + [figure(*found) for found in FIGURE.findall(prose)])


def settled(text, page):
    """The text with links that do not depend on the language: to the English page, and to the number of the heading."""

    def link(found):
        path, anchor = found.groups()
        if anchor and not path.startswith("http"):
            there = (ROOT / page).parent.joinpath(path).read_text(encoding="utf-8") if path else text
            anchors = [slug(unit.prose[0]) for unit in units(there) if unit.kind == "heading"]
            anchor = f"heading {anchors.index(anchor) + 1}" if anchor in anchors else anchor
        return f"]({path.replace('.zh.md', '.md')}{'#' * bool(anchor)}{anchor})"

    return LINK.sub(link, text)


def sign(unit):
    """What has to be the same in both."""
    return (unit.kind, unit.fixed, *(tuple(untouched(piece)) for piece in unit.prose))


def units(text):
    found, fence, paragraph = [], False, False
    for number, line in enumerate(text.splitlines(), 1):
        edge = line.lstrip().startswith("```")
        if edge or fence or line.startswith("    "):
            fence ^= edge
            comment = (fence and TREE.fullmatch(line)) or COMMENT.fullmatch(line)
            code, *prose = comment.groups() if comment else [line]
            found.append(Unit(number, line, "code", code, prose))
        elif line.startswith("#"):
            level, title = line.split(" ", 1)
            found.append(Unit(number, line, "heading", level, [title]))
        elif line.startswith("|"):
            found.append(Unit(number, line, "row", "", re.split(r"(?<!\\)\|", line)[1:-1]))
        elif line and paragraph and not ITEM.match(line):
            first = found.pop()
            found.append(first._replace(prose=[f"{first.prose[0]} {line.strip()}"]))
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


def partings(english, chinese, page="README.md"):
    """One line for each place where the two texts part."""
    one, other, name = units(settled(english, page)), units(settled(chinese, page)), translation(page)
    said = []
    matcher = SequenceMatcher(None, [sign(unit) for unit in one], [sign(unit) for unit in other], autojunk=False)
    for same, start, stop, begin, end in matcher.get_opcodes():
        if same == "equal":
            continue
        here, there = one[start:stop], other[begin:end]
        if [unit.kind for unit in here] == [unit.kind for unit in there]:
            said += [f"{page}:{a.line} and {name}:{b.line} differ: {difference(a, b)}" for a, b in zip(here, there)]
        else:
            said += [f"{page}:{unit.line} is missing in {name} {place(other, begin)}: {shown(unit)}" for unit in here]
            said += [f"{name}:{unit.line} is missing in {page} {place(one, start)}: {shown(unit)}" for unit in there]
    return said


def untranslated(chinese, page="README.md"):
    """Sentences without a Chinese character; names and what programs print are shorter, or code."""
    pieces = [(unit, re.sub(r"`[^`]+`|\([^)]*\)", "", piece)) for unit in units(chinese) for piece in unit.prose]
    return [
        f"{translation(page)}:{unit.line} is not translated: {shown(unit)}"
        for unit, piece in pieces
        if not re.search(HAN, piece) and re.search(r"[a-z]+(?:,? [a-z]+){3}", piece)
    ]


def mislabelled(english, chinese, page="README.md"):
    """What a console shows is in the English page as Mode (模式), in the Chinese one the other way round."""
    english = " ".join(english.split())
    said = [
        f"{translation(page)} lacks the label {label}"
        for label in sorted(set(re.findall(f"{HAN}(?:[ >]*{HAN})*", LINK.sub("]", english))) - {"中文"})
        if label not in chinese
    ]
    for found in re.finditer(r"（([A-Z][a-z][\w >]*)）", chinese):
        name, before = re.escape(found[1]), chinese[: found.start()]
        given = re.findall(rf"(?<!\w){name} [(|] ?({HAN}[^)|]*?) ?[)|]", english) or [""]
        if found[1] not in english or not any(before.endswith(label) for label in given):
            line = before.count("\n") + 1
            said.append(f"{translation(page)}:{line} has another label than {page}: {before[-8:]}{found[0]}")
    return said


@pytest.mark.parametrize("page", PAGES)
def test_the_chinese_page_says_what_the_english_one_says(page):
    english, chinese = read(page), read(translation(page))
    said = partings(english, chinese, page) + untranslated(chinese, page) + mislabelled(english, chinese, page)
    assert not said, "\n" + "\n".join(said)


def test_every_chinese_page_is_compared():
    found = {str(path.relative_to(ROOT)) for folder in (ROOT, ROOT / "docs") for path in folder.glob("*.zh.md")}
    assert found == {translation(page) for page in PAGES}


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

## Steps

1. Choose Mode (模式): Free (自由); see
   [the commands](#commands).
2. Make it:

   ```
   make quick      # 3 checks
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

## 步骤

1. 模式（Mode）选自由（Free），见[命令](#命令)。
2. 执行：

   ```
   make quick      # 3 项检查
   ```

什么也不输出。
"""


def test_a_translation_is_no_difference():
    assert partings(PAGE, TRANSLATED) + untranslated(TRANSLATED) + mislabelled(PAGE, TRANSLATED) == []


@pytest.mark.parametrize(
    ("line", "old", "new"),
    [
        pytest.param(25, "## 步骤\n", "", id="heading removed"),
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
        pytest.param(27, "(#命令", "(#步骤", id="link to another heading"),
        pytest.param(27, "1. 模式（Mode）选自由（Free），见[命令](#命令)。\n", "", id="item of a list removed"),
        pytest.param(32, "3 项", "4 项", id="figure of a comment changed"),
        pytest.param(35, "什么也不输出。\n", "", id="last paragraph removed"),
    ],
)
def test_the_line_where_they_part_is_named(line, old, new):
    assert TRANSLATED.count(old) == 1
    said = partings(PAGE, TRANSLATED.replace(old, new))
    assert len(said) == 1 and said[0].startswith(f"README.md:{line} "), said


def test_what_only_the_chinese_one_has_is_named():
    assert partings(PAGE, TRANSLATED + "\n多出来的 7 句。\n") == [
        "README.zh.md:35 is missing in README.md behind line 35: 多出来的 7 句。"
    ]


def test_a_sentence_that_was_copied_in_english_is_named():
    copied = TRANSLATED.replace("什么也不输出。", "It prints nothing at all.")
    assert untranslated(copied) == ["README.zh.md:33 is not translated: It prints nothing at all."]


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        (
            "自由（Free）",
            "免费（Free）",
            ["README.zh.md lacks the label 自由", "README.zh.md:26 has another label than README.md"],
        ),
        ("模式（Mode）", "模式（Boot Mode）", ["README.zh.md:26 has another label than README.md"]),
    ],
)
def test_a_label_that_the_console_does_not_show_is_named(old, new, said):
    found = mislabelled(PAGE, TRANSLATED.replace(old, new))
    assert len(found) == len(said) and all(line.startswith(start) for line, start in zip(found, said)), found


def test_links_to_either_page_are_the_same():
    """Whichever language the other page is in, and by the place of its heading."""
    english = settled("[a](docs/modelarts.md#an-image-of-your-own) [b](docs/modelarts.md) [c](#no-such)", "README.md")
    chinese = settled("[甲](docs/modelarts.zh.md#自己的镜像) [乙](docs/modelarts.md) [丙](#no-such)", "README.md")
    assert untouched(english) == untouched(chinese)
    assert "](docs/modelarts.md#heading " in english and "](#no-such)" in english
