"""The template of report.html: one self-contained file, in English and Chinese, for phones too, with a dark mode.

`t(en, zh)` is a text in both languages; the browser shows one of them. jinja2 escapes all values but figures, style and script.
"""

SCRIPT = """
const root = document.documentElement;
root.lang = (navigator.language || "en").toLowerCase().startsWith("zh") ? "zh" : "en";
document.getElementById("language").addEventListener("click", () => { root.lang = root.lang === "zh" ? "en" : "zh"; });
for (const slider of document.querySelectorAll("input[type=range]")) {
  slider.addEventListener("input", () => slider.closest(".pair").style.setProperty("--at", slider.value + "%"));
}
"""

STYLE = """
:root { color-scheme: light dark; --paper: #fff; --ink: #1d2330; --soft: #5d6675; --line: #d9dde4; --card: #f5f6f8; --heat: 59,130,196; }
@media (prefers-color-scheme: dark) { :root { --paper: #14171c; --ink: #e6e8ec; --soft: #a3abb8; --line: #363c47; --card: #1d2128; } }
html[lang=en] [lang=zh], html[lang=zh] [lang=en] { display: none; }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1rem; max-width: 1400px; background: var(--paper); color: var(--ink);
  font: 16px/1.5 system-ui, "Noto Sans CJK SC", "PingFang SC", "Microsoft YaHei", sans-serif; overflow-wrap: anywhere; }
h1 { font-size: 1.5rem; margin: .2rem 0; } h2 { font-size: 1.15rem; margin: 2rem 0 .5rem; }
.outcome { font-size: 1.15rem; margin: .5rem 0 1rem; } .soft, figcaption, th { color: var(--soft); } .soft { font-size: .9rem; }
.cards { display: grid; gap: 1rem; grid-template-columns: repeat(auto-fit, minmax(min(100%, 20rem), 1fr)); }
figure { margin: 0; padding: .75rem; background: var(--card); border-radius: .5rem; min-width: 0; } figure svg { width: 100%; height: auto; }
figure svg text { fill: currentColor; font-family: inherit; }
.scroll { overflow-x: auto; max-height: 32rem; overflow-y: auto; }
table { border-collapse: collapse; font-size: .9rem; } th, td { padding: .15rem .5rem; text-align: left; border-bottom: 1px solid var(--line);
  vertical-align: top; max-width: 24rem; } td.n, th.n { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
.heat td { text-align: right; min-width: 2.2rem; } .heat thead th { writing-mode: vertical-rl; transform: rotate(180deg); text-align: left;
  vertical-align: bottom; max-height: 14rem; }
.shots { display: grid; gap: .5rem; grid-template-columns: repeat(auto-fill, minmax(6.5rem, 1fr)); font-size: .8rem; }
.shots figure { padding: .4rem; } #events td, #events th, #how td, #how th { text-align: left; white-space: normal; }
.shots img { width: 100%; height: auto; image-rendering: pixelated; border-radius: .25rem; }
.pair { --at: 50%; display: grid; gap: .25rem; grid-template-columns: 1fr 1fr; } .pair .frame { position: relative; }
.pair img { width: 100%; display: block; } .pair .over { position: absolute; inset: 0; clip-path: inset(0 calc(100% - var(--at)) 0 0); }
.pair label { grid-column: 1 / -1; } .pair input { width: 100%; }
@media (max-width: 40rem) { .pair { grid-template-columns: 1fr; } }
.key { display: inline-block; width: .8em; height: .8em; border-radius: 2px; margin: 0 .3em 0 .8em; }
pre { white-space: pre-wrap; background: var(--card); padding: .5rem .75rem; border-radius: .5rem; margin: .25rem 0 .75rem; }
.warning { border-left: 3px solid #d9822b; padding-left: .6rem; margin: .3rem 0; } details { margin: .4rem 0; } summary { cursor: pointer; }
button { float: right; font: inherit; font-size: .85rem; color: inherit; background: var(--card); border: 1px solid var(--line); border-radius: .3rem; }
"""

MACROS = """
{%- macro t(en, zh) %}<span lang="en">{{ en }}</span><span lang="zh">{{ zh }}</span>{% endmacro -%}
{%- macro key(colour, en, zh) %}<span class="key" style="background:{{ colour }}"></span>{{ t(en, zh) }}{% endmacro -%}
{%- macro table(heads, rows) %}<div class="scroll" tabindex="0"><table><thead><tr>
{%- for en, zh in heads %}<th scope="col"{% if not loop.first %} class="n"{% endif %}>{{ t(en, zh) }}</th>{% endfor %}</tr></thead><tbody>
{% for row in rows %}<tr>{% for cell in row %}{% if loop.first %}<th scope="row"><bdi>{{ cell }}</bdi></th>{% else %}<td class="n">{{ cell }}</td>{% endif %}{% endfor %}</tr>
{% endfor %}</tbody></table></div>{% endmacro -%}
{%- macro result(o) %}{% set of = o.done ~ ("/" ~ o.epochs if o.epochs else "") %}
{%- if o.how == "finished" %}{{ t("Finished after " ~ of ~ " epochs", "已完成，共 " ~ of ~ " 个 epoch") }}
{%- elif o.how == "failed" %}{{ t("Failed after " ~ of ~ " epochs: " ~ o.why, "失败，已完成 " ~ of ~ " 个 epoch：" ~ o.why) }}
{%- elif o.how == "limit" %}{{ t("Ended by " ~ o.why ~ " after " ~ of ~ " epochs", "因 " ~ o.why ~ " 结束，已完成 " ~ of ~ " 个 epoch") }}
{%- elif o.how %}{{ t("Stopped after " ~ of ~ " epochs (" ~ o.why ~ "); the same command goes on",
  "已停止，已完成 " ~ of ~ " 个 epoch（" ~ o.why ~ "）；用同一命令继续") }}
{%- elif o.last %}{{ t(of ~ " epochs are done; no end was recorded: it still runs, or was killed after " ~ o.last,
  "已完成 " ~ of ~ " 个 epoch；没有结束的记录：仍在运行，或在 " ~ o.last ~ " 之后被终止") }}
{%- else %}{{ t(of ~ " epochs are done", "已完成 " ~ of ~ " 个 epoch") }}{% endif %}
{%- if o.best %}{{ t(". Best " ~ o.by ~ " " ~ o.value ~ ", in epoch " ~ o.best.epoch, "。最佳 " ~ o.by ~ " 为 " ~ o.value ~
  "（第 " ~ o.best.epoch ~ " 个 epoch）") }}{% endif %}
{%- if o.file %}{{ t(", its weights: " ~ o.file, "，权重：" ~ o.file) }}{% endif %}
{%- if o.device %}{{ t(", in " ~ o.spent ~ " on " ~ o.ranks ~ " × " ~ o.device, "，用时 " ~ o.spent ~ "，" ~ o.ranks ~ " × " ~ o.device) }}
{%- endif %}{{ t(".", "。") }}
{%- if o.range %}{{ t(" With " ~ o.range[2] ~ " test images it may be anything from " ~ o.range[0] ~ " to " ~ o.range[1] ~ ".",
  "测试图像只有 " ~ o.range[2] ~ " 张，实际可能在 " ~ o.range[0] ~ " 到 " ~ o.range[1] ~ " 之间。") }}{% endif %}{% endmacro -%}
{%- macro drawn(figure) %}<figure id="{{ figure.name }}"><figcaption id="of-{{ figure.name }}">{{ t(*figure.title) }}
{%- for colour, en, zh in figure.legend %}{{ key(colour, en, zh) }}{% endfor %}</figcaption>
<div role="img" aria-labelledby="of-{{ figure.name }}">{{ figure.svg | safe }}</div>
<details><summary>{{ t("Numbers", "数据") }}</summary>{{ table(figure.heads, figure.rows) }}</details></figure>{% endmacro -%}
"""

PAGE = (
    MACROS
    + """<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src '{{ script_hash }}'">
<title>{{ title }}</title><style>{{ style | safe }}</style></head><body>
<button id="language" type="button">{{ t("中文", "English") }}</button>
<main>MAIN</main>
<p class="soft">{{ t("Made by anyrank " ~ version ~ " at " ~ now, "由 anyrank " ~ version ~ " 生成于 " ~ now) }}</p>
<script>{{ script | safe }}</script></body></html>
"""
)

ONE_RUN = """
{%- set after = (" after epoch " ~ epoch, "（第 " ~ epoch ~ " 个 epoch 之后）") if epoch else ("", "") %}
<h1><bdi>{{ run.name }}</bdi></h1>
<p class="outcome" id="outcome">{{ result(outcome) }}</p>
{% if run.start.synthetic %}<p class="warning">{{ t("The images are synthetic: the accuracy means nothing.", "图像是合成的：准确率没有意义。") }}</p>{% endif %}

<section id="curves"><h2>{{ t("Loss, metrics and learning rate over the samples seen", "损失、指标和学习率（横轴：已训练的样本数）") }}</h2>
<p class="soft">{{ key(marks.best[0], "best epoch", "最佳 epoch") }}{{ key(marks.restart[0], "restart", "重新启动") }}{{ key(marks.nodes[0], "nodes came or went", "节点加入或离开") }}</p>
{% if curves %}<div class="cards">{% for figure in curves %}{{ drawn(figure) }}{% endfor %}</div>
{% else %}<p>{{ t("No epoch has ended yet.", "还没有完成一个 epoch。") }}</p>{% endif %}</section>
{% if events %}<section id="events"><h2>{{ t("What happened", "发生了什么") }}</h2>
{{ table([("Time", "时间"), ("Samples", "样本数"), ("Event", "事件")], events) }}</section>{% endif %}

{% if speed %}<section id="time"><h2>{{ t("Where the time went", "时间用在哪里") }}</h2>
<div class="cards">{% for figure in speed %}{{ drawn(figure) }}{% endfor %}</div></section>{% endif %}

{% if sources %}<section id="sources"><h2>{{ t("Where the data came from", "数据来自哪里") }}</h2>
{{ table([("Epoch", "Epoch"), ("From the bucket, MiB", "来自存储桶，MiB"), ("of them ahead of their shards", "其中先于分片"), ("On the disk before, MiB", "原已在磁盘，MiB"), ("Waited, s", "等待，秒")], sources) }}</section>{% endif %}

{% if confusion.rows %}<section id="confusion">
<h2>{{ t("Confusion matrix" ~ after[0] ~ ": rows are the true class, columns the predicted one", "混淆矩阵" ~ after[1] ~ "：行是真实类别，列是预测类别") }}</h2>
{% if outcome.best and epoch and epoch != outcome.best.epoch %}<p class="soft">{{ t("The best weights are those of epoch " ~ outcome.best.epoch ~ ".", "最好的权重是第 " ~ outcome.best.epoch ~ " 个 epoch 的。") }}</p>{% endif %}
<div class="scroll" tabindex="0"><table class="heat"><thead><tr><td></td>
{%- for name in confusion.names %}<th scope="col"><bdi>{{ name }}</bdi></th>{% endfor %}</tr></thead><tbody>
{% for name, cells in confusion.rows %}<tr><th scope="row"><bdi>{{ name }}</bdi></th>{% for count, heat in cells %}
{%- if count %}<td style="background:rgba(var(--heat),{{ heat }})">{{ count }}</td>{% else %}<td>·</td>{% endif %}{% endfor %}</tr>
{% endfor %}</tbody></table></div></section>{% endif %}
{% if confusion.pairs %}<section id="confused"><h2>{{ t("The most frequent confusions", "最常见的混淆") }}</h2>
{{ table([("True class", "真实类别"), ("Predicted", "预测类别"), ("How often", "次数"), ("Of the class", "占该类别")], confusion.pairs) }}
</section>{% endif %}
{% if classes %}<section id="classes"><h2>{{ t("Each class" ~ after[0], "各类别" ~ after[1]) }}</h2>
<details{% if classes | length <= 30 %} open{% endif %}><summary>{{ t(classes | length ~ " classes, the worst first", classes | length ~ " 个类别，最差的在前") }}</summary>
{{ table([("Class", "类别"), ("Images", "图像数"), ("Recall", "召回率"), ("Precision", "精确率"), ("F1", "F1")], classes) }}</details></section>{% endif %}

{% for kind, shots in galleries if shots %}<section id="{{ kind }}">
<h2>{% if kind == "worst" %}{{ t("The worst mistakes: those with the highest loss", "最严重的错误：损失最高的图像") }}
{%- else %}{{ t("The surest mistakes: wrong with the highest confidence", "最自信的错误：置信度最高的错误预测") }}{% endif %}</h2>
<div class="shots">{% for shot in shots %}<figure>
{%- if shot.image %}<img src="{{ shot.image }}" width="64" height="64" alt="{{ shot.name }}: {{ shot.class }} → {{ shot.predicted }}">{% endif %}
<figcaption><bdi>{{ shot.name }}</bdi><br>{{ t("is", "真实") }} <b><bdi>{{ shot.class }}</bdi></b><br>{{ t("given", "预测") }}
<b><bdi>{{ shot.predicted }}</bdi></b> {{ "{:.0%}".format(shot.sure) }}</figcaption></figure>{% endfor %}</div></section>{% endfor %}

{% if mistakes %}<section id="mistakes"><h2>{{ t("All mistakes" ~ after[0] ~ ", up to 1,000", "所有错误" ~ after[1] ~ "，最多 1,000 个") }}</h2>
<details><summary>{{ mistakes | length }}</summary>{{ table([("Image", "图像"), ("True class", "真实类别"), ("Predicted", "预测类别"), ("Confidence", "置信度")], mistakes) }}</details></section>{% endif %}

{% if data %}<section id="data"><h2>{{ t("Pictures of each class", "各类别的图像数") }}</h2>
{% for reason, count, name in data.left_out %}<p>{{ t("Left out, " ~ reason ~ ": " ~ count ~ ", the first is " ~ name, "未使用（" ~ reason ~ "）：" ~ count ~ "，第一个是 " ~ name) }}</p>
{%- else %}<p>{{ t("Nothing was left out.", "没有未使用的文件。") }}</p>{% endfor %}
<details{% if data.classes | length <= 30 %} open{% endif %}><summary>{{ data.classes | length }}</summary>{{ table([("Class", "类别"), ("Training", "训练"), ("Validation", "验证")], data.classes) }}</details></section>{% endif %}

{% if restored %}<section id="restored"><h2>{{ t("Examples after the newest evaluation: " ~ restored.name, "最近一次评估的例子：" ~ restored.name) }}</h2>
<div class="cards">{% for images in restored.rows %}<figure class="pair"><div class="frame">
<img src="{{ images[1] }}" alt="{{ restored.columns[1] }} {{ loop.index }}"><img class="over" src="{{ images[0] }}" alt="{{ restored.columns[0] }} {{ loop.index }}"></div>
<div><img src="{{ images[2] }}" alt="{{ restored.columns[2] }} {{ loop.index }}"></div>
<label>{{ restored.columns[0] }} ← → {{ restored.columns[1] }}; {{ t("beside it", "旁边是") }} {{ restored.columns[2] }}<input type="range" min="0" max="100" value="50"></label></figure>{% endfor %}</div></section>{% endif %}

{% if warnings %}<section id="warnings"><h2>{{ t("Warnings", "警告") }}</h2>
{% for text, count in warnings %}<p class="warning"><bdi>{{ text }}</bdi>{% if count > 1 %} (×{{ count }}){% endif %}</p>{% endfor %}</section>{% endif %}

<section id="how"><h2>{{ t("How it ran", "运行方式") }}</h2>
{% if go_on %}<p>{{ t("To go on:", "继续训练：") }}</p><pre>{{ go_on }}</pre>{% endif %}
{% if use %}<p>{{ t("A network for any program:", "导出为任何程序可用的网络：") }}</p><pre>{{ use }}</pre>{% endif %}
{% if again %}<p>{{ t("To start it again from the beginning:", "从头再训练一次：") }}</p><pre>{{ again }}</pre>{% endif %}
{% if options %}{{ table([("Option", "选项"), ("Value", "值"), ("Default", "默认值")], options) }}{% endif %}
{% if machine %}{{ table([("Machine and versions", "机器和版本"), ("", "")], machine) }}{% endif %}</section>
"""
