import os

import numpy as np

for split, count in (("train", 640), ("test", 100)):
    os.makedirs(f"arrays/{split}", exist_ok=True)
    draw = np.random.default_rng(count)
    labels = draw.integers(0, 2, count)
    images = draw.integers(0, 156, (count, 3, 16, 16)) + 100 * labels[:, None, None, None]
    np.save(f"arrays/{split}/images.npy", images.astype(np.uint8))
    np.save(f"arrays/{split}/labels.npy", labels)
