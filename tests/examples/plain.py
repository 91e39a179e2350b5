import torch
from torch.utils.data import DataLoader, TensorDataset, random_split

torch.manual_seed(0)
inputs = torch.randn(2000, 8)
targets = inputs.sin().sum(dim=1, keepdim=True)
train_set, val_set = random_split(TensorDataset(inputs, targets), [1600, 400])
train_loader = DataLoader(train_set, batch_size=64, shuffle=True)
val_loader = DataLoader(val_set, batch_size=400)
model = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=20)
loss_fn = torch.nn.MSELoss()
for epoch in range(20):
    model.train()
    for x, y in train_loader:
        loss = loss_fn(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    scheduler.step()
    model.eval()
    with torch.no_grad():
        val_loss = sum(loss_fn(model(x), y).item() * len(x) for x, y in val_loader) / len(val_set)
    print(epoch, val_loss)
