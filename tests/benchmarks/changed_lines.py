"""How many lines make a plain script one for several processes, by start(), by Fabric and by Accelerate.

    pip install lightning-fabric accelerate
    python -m tests.benchmarks.changed_lines

The scripts are those of tests/tools/plain_scripts.py. Each form is started twice by two processes, and the second start has to go on
after the last whole epoch of the first. By Fabric and Accelerate that is written as their pages show it: state at the end of each epoch,
and a file with the number of the epoch. They have no form for a restart within an epoch that gives the same bits, and none is counted.
"""

import difflib
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.benchmarks.base import machine
from tests.tools.jobs import ROOT, environment
from tests.tools.plain_scripts import SCRIPTS, as_a_job, replaced

FABRIC = "from lightning_fabric import Fabric\n\nfabric = Fabric()\nfabric.launch()\n"
ACCELERATE = "from accelerate import Accelerator\n\naccelerator = Accelerator()\n"


def saved_by_fabric(loop, end, state):
    """The changes that let it go on after an epoch."""
    goes_on = f'state = {{"epoch": -1, {state}}}\nif os.path.exists("state.ckpt"):\n    fabric.load("state.ckpt", state)\n'
    again = loop.replace("range(", 'range(state["epoch"] + 1, ')
    return [(loop, goes_on + again), (end, f'{end}\n    state["epoch"] = epoch\n    fabric.save("state.ckpt", state)')]


def saved_by_accelerate(loop, end, more=""):
    goes_on = f'{more}done = Path("state/done")\nif done.exists():\n    accelerator.load_state("state")\n'
    again = loop.replace("range(", "range(int(done.read_text()) if done.exists() else 0, ")
    saves = '    accelerator.save_state("state")\n    if accelerator.is_main_process:\n        done.write_text(str(epoch + 1))'
    return [(loop, goes_on + again), (end, f"{end}\n{saves}")]


# {script: (changes for several processes, changes for going on)}
BY_FABRIC = {
    "vectors": (
        [
            ("torch.manual_seed(1)\n", f"{FABRIC}fabric.seed_everything(1)\n"),
            ("optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)\n", "optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)\nnet, optimizer = fabric.setup(net, optimizer)\ntrain_loader, test_loader = fabric.setup_dataloaders(train_loader, test_loader)\n"),
            ("        loss.backward()\n", "        fabric.backward(loss)\n"),
            ("    print(f\"epoch {epoch}: accuracy {correct / len(test_data):.3f}\")", "    correct = fabric.all_reduce(torch.tensor(correct), reduce_op=\"sum\")\n    fabric.print(f\"epoch {epoch}: accuracy {correct / len(test_data):.3f}\")"),
        ],
        saved_by_fabric("for epoch in range(3):", "accuracy {correct / len(test_data):.3f}\")", '"net": net, "optimizer": optimizer'),
    ),
    "tokens": (
        [
            ("train_set = Sent", f"{FABRIC}train_set = Sent"),
            ("optimizer = torch.optim.AdamW(model.parameters(), lr=0.003)\n", "optimizer = torch.optim.AdamW(model.parameters(), lr=0.003)\nmodel, optimizer = fabric.setup(model, optimizer)\ntrain_loader, val_loader = fabric.setup_dataloaders(train_loader, val_loader)\n"),
            ("        (loss / 4).backward()\n", "        with fabric.no_backward_sync(model, enabled=(step + 1) % 4 != 0):\n            fabric.backward(loss / 4)\n"),
            ("    print(val_loss)", "    fabric.print(fabric.all_reduce(torch.tensor(val_loss), reduce_op=\"sum\"))"),
        ],
        saved_by_fabric("for epoch in range(2):", "reduce_op=\"sum\"))", '"model": model, "optimizer": optimizer'),
    ),
    "gan": (
        [
            ("torch.manual_seed(0)\n", f"{FABRIC}fabric.seed_everything(0)\n"),
            ("bce = nn", "generator, opt_g = fabric.setup(generator, opt_g)\ndiscriminator, opt_d = fabric.setup(discriminator, opt_d)\nloader = fabric.setup_dataloaders(loader)\nbce = nn"),
            ("        loss_d.backward()\n", "        fabric.backward(loss_d)\n"),
            ("        loss_g.backward()\n", "        fabric.backward(loss_g)\n"),
            ("    print(f\"{epoch}: {loss_d.item():.3f} {loss_g.item():.3f}\")", "    loss_g = fabric.all_reduce(loss_g)\n    fabric.print(f\"{epoch}: {loss_g.item():.3f}\")"),
        ],
        saved_by_fabric("for epoch in range(2):", "{loss_g.item():.3f}\")", '"g": generator, "d": discriminator, "opt_g": opt_g, "opt_d": opt_d'),
    ),
    "autoencoder": (
        [
            ("torch.manual_seed(3)\n", f"{FABRIC}fabric.seed_everything(3)\n"),
            ("use_buffers=True)\n", "use_buffers=True)\nmodel, optimizer = fabric.setup(model, optimizer)\ntrain_loader, test_loader = fabric.setup_dataloaders(train_loader, test_loader)\n"),
            ("        loss.backward()\n", "        fabric.backward(loss)\n"),
            ("    print(epoch, error / len(test_set))", "    error = fabric.all_reduce(torch.tensor(error), reduce_op=\"sum\").item()\n    fabric.print(epoch, error / len(test_set))"),
        ],
        saved_by_fabric("for epoch in range(2):", "error / len(test_set))", '"model": model, "optimizer": optimizer, "ema": ema'),
    ),
    "plateau": (
        [
            ("torch.manual_seed(0)\n", f"{FABRIC}fabric.seed_everything(0)\n"),
            ("scheduler = Red", "model, optimizer = fabric.setup(model, optimizer)\ntrain_loader, val_loader = fabric.setup_dataloaders(train_loader, val_loader)\nscheduler = Red"),
            ("        loss.backward()\n", "        fabric.backward(loss)\n"),
            ("    scheduler.step(mse)\n", "    mse = fabric.all_reduce(torch.tensor(mse), reduce_op=\"sum\").item()\n    scheduler.step(mse)\n"),
            ("    print(epoch, mse)", "    fabric.print(epoch, mse)"),
        ],
        saved_by_fabric("for epoch in range(4):", "fabric.print(epoch, mse)", '"model": model, "optimizer": optimizer, "scheduler": scheduler'),
    ),
    "images": (
        [
            ("torch.manual_seed(0)\n", f"{FABRIC}fabric.seed_everything(0)\n"),
            ("scheduler = torch.optim", "model, optimizer = fabric.setup(model, optimizer)\ntrain_loader, test_loader = fabric.setup_dataloaders(train_loader, test_loader)\nscheduler = torch.optim"),
            ("        loss.backward()\n", "        fabric.backward(loss)\n"),
            ("    print(\"accuracy\", right / len(test_set))", "    right = fabric.all_reduce(torch.tensor(right), reduce_op=\"sum\").item()\n    fabric.print(\"accuracy\", right / len(test_set))"),
            ("device = torch.device(\"cuda\" if torch.cuda.is_available() else \"cpu\")", "device = fabric.device"),
        ],
        saved_by_fabric("for epoch in range(2):", "right / len(test_set))", '"model": model, "optimizer": optimizer, "scheduler": scheduler'),
    ),
}  # fmt: skip

BY_ACCELERATE = {
    "vectors": (
        [
            ("torch.manual_seed(1)\n", f"{ACCELERATE}torch.manual_seed(1)\n"),
            ("criterion = ", "net, optimizer, train_loader, test_loader = accelerator.prepare(net, optimizer, train_loader, test_loader)\ncriterion = "),
            ("        loss.backward()\n", "        accelerator.backward(loss)\n"),
            ("            correct += (net(inputs).argmax(1) == targets).sum().item()\n", "            right = accelerator.gather_for_metrics(net(inputs).argmax(1) == targets)\n            correct += right.sum().item()\n"),
            ("    print(f", "    accelerator.print(f"),
        ],
        saved_by_accelerate("for epoch in range(3):", "accuracy {correct / len(test_data):.3f}\")"),
    ),
    "tokens": (
        [
            ("train_set = Sent", f"{ACCELERATE.replace('()', '(gradient_accumulation_steps=4)')}train_set = Sent"),
            ("loss_fn = nn", "model, optimizer, train_loader, val_loader = accelerator.prepare(model, optimizer, train_loader, val_loader)\nloss_fn = nn"),
            ("    for step, (tokens, labels) in enumerate(train_loader):\n        loss = loss_fn(model(tokens), labels)\n        (loss / 4).backward()\n        if (step + 1) % 4 == 0:\n",
             "    for tokens, labels in train_loader:\n        with accelerator.accumulate(model):\n            loss = loss_fn(model(tokens), labels)\n            accelerator.backward(loss)\n"),
            ("    print(val_loss)", "    accelerator.print(accelerator.reduce(torch.tensor(val_loss)))"),
        ],
        saved_by_accelerate("for epoch in range(2):", "accelerator.reduce(torch.tensor(val_loss)))"),
    ),
    "gan": (
        [
            ("torch.manual_seed(0)\n", f"{ACCELERATE}torch.manual_seed(0)\n"),
            ("bce = nn", "generator, discriminator, opt_g, opt_d, loader = accelerator.prepare(generator, discriminator, opt_g, opt_d, loader)\nbce = nn"),
            ("        loss_d.backward()\n", "        accelerator.backward(loss_d)\n"),
            ("        loss_g.backward()\n", "        accelerator.backward(loss_g)\n"),
            ("    print(f\"{epoch}: {loss_d.item():.3f} {loss_g.item():.3f}\")", "    loss_g = accelerator.reduce(loss_g, \"mean\")\n    accelerator.print(f\"{epoch}: {loss_g.item():.3f}\")"),
        ],
        saved_by_accelerate("for epoch in range(2):", "{loss_g.item():.3f}\")"),
    ),
    "autoencoder": (
        [
            ("torch.manual_seed(3)\n", f"{ACCELERATE}torch.manual_seed(3)\n"),
            ("ema = AveragedModel(model,", "model, optimizer, train_loader, test_loader = accelerator.prepare(model, optimizer, train_loader, test_loader)\nema = AveragedModel(model,"),
            ("        loss.backward()\n", "        accelerator.backward(loss)\n"),
            ("    print(epoch, error / len(test_set))", "    error = accelerator.reduce(torch.tensor(error)).item()\n    accelerator.print(epoch, error / len(test_set))"),
        ],
        saved_by_accelerate("for epoch in range(2):", "error / len(test_set))", "accelerator.register_for_checkpointing(ema)\n"),
    ),
    "plateau": (
        [
            ("torch.manual_seed(0)\n", f"{ACCELERATE}torch.manual_seed(0)\n"),
            ("scheduler = Red", "model, optimizer, train_loader, val_loader = accelerator.prepare(model, optimizer, train_loader, val_loader)\nscheduler = Red"),
            ("        loss.backward()\n", "        accelerator.backward(loss)\n"),
            ("    scheduler.step(mse)\n", "    mse = accelerator.reduce(torch.tensor(mse)).item()\n    scheduler.step(mse)\n"),
            ("    print(epoch, mse)", "    accelerator.print(epoch, mse)"),
        ],
        saved_by_accelerate("for epoch in range(4):", "accelerator.print(epoch, mse)", "accelerator.register_for_checkpointing(scheduler)\n"),
    ),
    "images": (
        [
            ("torch.manual_seed(0)\n", f"{ACCELERATE}torch.manual_seed(0)\n"),
            ("for epoch in", "model, optimizer, train_loader, test_loader, scheduler = accelerator.prepare(\n    model, optimizer, train_loader, test_loader, scheduler\n)\nfor epoch in"),
            ("        loss.backward()\n", "        accelerator.backward(loss)\n"),
            ("            right += (model(images.to(device)).argmax(1).cpu() == labels.cpu()).sum().item()\n", "            right += accelerator.gather_for_metrics(model(images).argmax(1) == labels).sum().item()\n"),
            ("    print(\"accuracy\"", "    accelerator.print(\"accuracy\""),
            ("device = torch.device(\"cuda\" if torch.cuda.is_available() else \"cpu\")", "device = accelerator.device"),
        ],
        saved_by_accelerate("for epoch in range(2):", "right / len(test_set))"),
    ),
}  # fmt: skip


def changed_lines(before, after):
    """Lines that were changed or added."""
    return sum(line[:2] == "+ " and bool(line[2:].strip()) for line in difflib.ndiff(before.splitlines(), after.splitlines()))


def goes_on(text, folder, *ours):
    """What it prints in a second start of two processes, which has nothing left to do."""
    (folder / "script.py").write_text(text)
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", "script.py", *ours]
    path = {"PYTHONPATH": f"{ROOT}:{':'.join(sys.path)}"}
    starts = [subprocess.run(words, cwd=folder, env=environment(**path), capture_output=True, text=True) for _ in range(2)]
    for done in starts:
        if done.returncode:
            raise RuntimeError(f"{text}\n{done.stdout}\n{done.stderr}")
    return starts[0].stdout, starts[1].stdout


def row(name):
    plain = SCRIPTS[name][0]
    ours = as_a_job(name)
    numbers = [changed_lines(plain, ours)]
    with tempfile.TemporaryDirectory() as folder:
        first, second = goes_on(ours, Path(folder))
        assert "done: " in first and "nothing to do: " in second, second
    for peer, imports in ((BY_FABRIC, "import os\n"), (BY_ACCELERATE, "from pathlib import Path\n")):
        several, going_on = peer[name]
        without = replaced(plain, several)
        whole = imports + replaced(without, going_on)
        with tempfile.TemporaryDirectory() as folder:
            first, second = goes_on(whole, Path(folder))
            assert first.strip() and not second.strip(), (name, first, second)
        numbers += [changed_lines(plain, without), changed_lines(plain, whole)]
    return numbers


def main():
    print(f"{machine()}\n")
    print("| script | start() | Fabric | and goes on after an epoch | Accelerate | and goes on after an epoch |")
    print("|---|---|---|---|---|---|")
    for name in SCRIPTS:
        print(f"| {name} | {' | '.join(map(str, row(name)))} |", flush=True)


if __name__ == "__main__":
    main()
