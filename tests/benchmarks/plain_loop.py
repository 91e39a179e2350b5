"""A training as people write it: torchvision's ImageFolder and ResNet-18, AdamW and OneCycleLR; own_pictures compares with it.

python -m tests.benchmarks.plain_loop FOLDER EPOCHS SEED        FOLDER/{train,val}/CLASS/*.jpg; prints the best accuracy
"""

import sys

import torch
from torchvision import datasets, models, transforms

SIZE, BATCH, RATE = 64, 32, 1e-3
NORMALISED = [transforms.ToTensor(), transforms.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))]
TRAIN = transforms.Compose([transforms.Resize((SIZE, SIZE)), transforms.RandomHorizontalFlip(), *NORMALISED])
VAL = transforms.Compose([transforms.Resize((SIZE, SIZE)), *NORMALISED])


def main(folder, epochs, seed):
    torch.manual_seed(seed)
    train_set, val_set = (datasets.ImageFolder(f"{folder}/{part}", how) for part, how in (("train", TRAIN), ("val", VAL)))
    train_loader = torch.utils.data.DataLoader(train_set, BATCH, shuffle=True)
    val_loader = torch.utils.data.DataLoader(val_set, 100)
    model = models.resnet18(num_classes=len(train_set.classes))
    loss_fn = torch.nn.CrossEntropyLoss()
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=RATE, total_steps=epochs * len(train_loader))
    best = 0.0
    for _ in range(epochs):
        model.train()
        for images, labels in train_loader:
            optimizer.zero_grad()
            loss_fn(model(images), labels).backward()
            optimizer.step()
            schedule.step()
        model.eval()
        with torch.no_grad():
            right = sum((model(images).argmax(1) == labels).sum().item() for images, labels in val_loader)
        best = max(best, right / len(val_set))
    print(best)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
