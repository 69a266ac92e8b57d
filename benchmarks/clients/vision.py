"""Libraries for images."""

from pathlib import Path
from typing import Any

from .harness import client


@client("lightly", "lightning", "the Trainer")
def lightly(strategy: str) -> Any:
    """SimCLR and BYOL from its parts: a momentum encoder that is updated within the step."""
    import copy

    import lightning as L
    import torch
    import torchvision
    from lightly.loss import NegativeCosineSimilarity, NTXentLoss
    from lightly.models.modules import BYOLPredictionHead, BYOLProjectionHead, SimCLRProjectionHead
    from lightly.models.utils import deactivate_requires_grad, update_momentum
    from lightly.transforms import SimCLRTransform

    class SimCLR(L.LightningModule):
        def __init__(self):
            super().__init__()
            net = torchvision.models.resnet18(width_per_group=64)
            self.backbone = torch.nn.Sequential(*list(net.children())[:-1])
            self.head = SimCLRProjectionHead(512, 16, 8)
            self.criterion = NTXentLoss()

        def training_step(self, batch, index):
            (one, other), _ = batch
            both = [self.head(self.backbone(view).flatten(1)) for view in (one, other)]
            return self.criterion(*both)

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)

    class BYOL(SimCLR):
        def __init__(self):
            super().__init__()
            self.head = BYOLProjectionHead(512, 16, 8)
            self.predict = BYOLPredictionHead(8, 16, 8)
            self.slow_backbone, self.slow_head = copy.deepcopy(self.backbone), copy.deepcopy(self.head)
            deactivate_requires_grad(self.slow_backbone)
            deactivate_requires_grad(self.slow_head)
            self.criterion = NegativeCosineSimilarity()

        def training_step(self, batch, index):
            (one, other), _ = batch
            update_momentum(self.backbone, self.slow_backbone, m=0.9)
            update_momentum(self.head, self.slow_head, m=0.9)

            def fast(view):
                return self.predict(self.head(self.backbone(view).flatten(1)))

            def slow(view):
                return self.slow_head(self.slow_backbone(view).flatten(1)).detach()

            return (self.criterion(fast(one), slow(other)) + self.criterion(fast(other), slow(one))) / 2

    images = torchvision.datasets.FakeData(16, (3, 32, 32), transform=SimCLRTransform(input_size=32))
    loader = torch.utils.data.DataLoader(images, batch_size=4, drop_last=True)
    modules = [SimCLR(), BYOL()]
    for module in modules:
        L.Trainer(
            accelerator="cpu",
            strategy=strategy,
            max_steps=3,
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            enable_checkpointing=False,
        ).fit(module, loader)
    return modules


@client("anomalib", "lightning", "`Engine(strategy='superpipeline')`")
def anomalib(strategy: str) -> Any:
    """GANomaly, with two optimizers by hand, and reverse distillation from a frozen teacher, tested and predicting."""
    import numpy
    from anomalib.data import Folder
    from anomalib.engine import Engine
    from anomalib.models import Ganomaly, ReverseDistillation
    from PIL import Image

    draw = numpy.random.default_rng(0)
    for kind, light in (("good", 90), ("bad", 200)):
        Path(kind).mkdir()
        for index in range(12):
            Image.fromarray(draw.integers(0, light, (64, 64, 3), "uint8")).save(f"{kind}/{index}.png")
    images = {"normal_dir": "good", "abnormal_dir": "bad"}
    results = []
    common = {"visualizer": False, "pre_processor": Ganomaly.configure_pre_processor((64, 64))}
    for model in (Ganomaly(4, 8, 8, **common), ReverseDistillation("resnet18", pre_trained=False, **common)):
        data = Folder("tiny", root=".", train_batch_size=4, eval_batch_size=4, num_workers=0, seed=0, **images)
        engine = Engine(accelerator="cpu", devices=1, strategy=strategy, max_epochs=2, enable_progress_bar=False)
        engine.fit(model, datamodule=data)
        predicted = engine.predict(model, datamodule=data)
        results += [model, engine.test(model, datamodule=data, verbose=False), [p.pred_score for p in predicted]]
    return results


@client("torchgeo", "lightning", "the Trainer")
def torchgeo(strategy: str) -> Any:
    """A U-Net that segments, with a frozen encoder, and a classifier, each tested and predicting."""
    import lightning as L
    import torch
    from torchgeo.trainers import ClassificationTask, SemanticSegmentationTask

    draw = torch.Generator().manual_seed(0)
    rows = [
        {"image": torch.randn(3, 32, 32, generator=draw), "mask": torch.randint(0, 2, (32, 32), generator=draw)}
        for _ in range(8)
    ]
    labelled = [{"image": row["image"], "label": row["mask"].float().mean().round().long()} for row in rows]
    results = []
    for task, data in (
        (SemanticSegmentationTask("unet", "resnet18", in_channels=3, num_classes=2, freeze_backbone=True), rows),
        (ClassificationTask(model="resnet18", in_channels=3, num_classes=2), labelled),
    ):
        loader = torch.utils.data.DataLoader(data, batch_size=4)
        trainer = L.Trainer(
            accelerator="cpu",
            strategy=strategy,
            max_epochs=2,
            logger=False,
            enable_progress_bar=False,
            log_every_n_steps=1,
        )
        trainer.fit(task, loader, loader)
        results += [task, trainer.test(task, loader, verbose=False), trainer.predict(task, loader)]
    return results
