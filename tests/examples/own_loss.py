import torch


class FocalLoss(torch.nn.Module):
    """Cross-entropy in which samples that are recognised count less: https://arxiv.org/abs/1708.02002"""

    def __init__(self, gamma=2.0):
        super().__init__()
        self.gamma = gamma

    def forward(self, logits, labels):
        loss = torch.nn.functional.cross_entropy(logits, labels, reduction="none")
        return ((1 - torch.exp(-loss)) ** self.gamma * loss).mean()
