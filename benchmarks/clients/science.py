"""Libraries for chemistry, biology and physics."""

from typing import Any

import numpy

from .harness import client

QUIET = {"accelerator": "cpu", "logger": False, "enable_progress_bar": False, "enable_model_summary": False}


@client("chemprop", "lightning", "the Trainer")
def chemprop(strategy: str) -> Any:
    """A message passing network over molecules, with batch normalization, tested and predicting."""
    import lightning as L
    from chemprop import data, models, nn

    smiles = ["C" * n + end for n in range(1, 9) for end in ("O", "N", "C(=O)O", "c1ccccc1")]
    points = [data.MoleculeDatapoint.from_smi(text, [float(len(text))]) for text in smiles]
    dataset = data.MoleculeDataset(points)
    scaler = dataset.normalize_targets()
    loader = data.build_dataloader(dataset, batch_size=8, num_workers=0, seed=0)
    model = models.MPNN(
        nn.BondMessagePassing(d_h=32, dropout=0.1),
        nn.MeanAggregation(),
        nn.RegressionFFN(
            input_dim=32, hidden_dim=32, output_transform=nn.UnscaleTransform.from_standard_scaler(scaler)
        ),
        batch_norm=True,
    )
    trainer = L.Trainer(**QUIET, strategy=strategy, max_epochs=3)
    trainer.fit(model, loader)
    rest = data.build_dataloader(dataset, batch_size=8, num_workers=0, shuffle=False)
    return [model, trainer.test(model, rest, verbose=False), trainer.predict(model, rest)]


@client("matgl", "lightning", "the Trainer")
def matgl(strategy: str) -> Any:
    """An M3GNet potential: its loss has forces, so that backward goes through a backward pass within the step."""
    import lightning as L
    from matgl.ext.pymatgen import Structure2Graph
    from matgl.graph.data import MGLDataLoader, MGLDataset
    from matgl.models import M3GNet
    from matgl.utils.training import PotentialLightningModule
    from pymatgen.core import Lattice, Structure

    draw = numpy.random.default_rng(0)
    structures = [
        Structure(Lattice.cubic(3.9), ["Mo", "S"], [[0, 0, 0], 0.5 + draw.normal(size=3) / 20]) for _ in range(8)
    ]
    labels = {
        "energies": draw.normal(size=8).tolist(),
        "forces": draw.normal(size=(8, 2, 3)).tolist(),
        "stresses": numpy.zeros((8, 3, 3)).tolist(),
    }
    elements = ("Mo", "S")
    data = MGLDataset(
        structures=structures, converter=Structure2Graph(elements, cutoff=4.0), labels=labels, save_cache=False
    )
    train, val = MGLDataLoader(data, data, batch_size=4, num_workers=0)
    net = M3GNet(
        element_types=elements, dim_node_embedding=8, dim_edge_embedding=8, units=8, cutoff=4.0, is_intensive=False
    )
    module = PotentialLightningModule(model=net, lr=0.01, stress_weight=0.1)
    trainer = L.Trainer(**QUIET, strategy=strategy, max_epochs=2, inference_mode=False)
    trainer.fit(module, train, val)
    return [module, trainer.validate(module, val, verbose=False)]


@client("pina-mathlab", "lightning", "`pina.Trainer(solver, strategy='superpipeline')`")
def pina(strategy: str) -> Any:
    """A physics-informed network: its loss has second derivatives by the inputs."""
    from pina import Trainer
    from pina.model import FeedForward
    from pina.problem.zoo import Poisson2DSquareProblem
    from pina.solver import PINN

    problem = Poisson2DSquareProblem()
    problem.discretise_domain(16, "random", domains=["D", "boundary"])
    solver = PINN(problem, FeedForward(input_dimensions=2, output_dimensions=1, inner_size=16, n_layers=4))
    trainer = Trainer(solver, **QUIET, strategy=strategy, max_epochs=5, batch_size=8)
    trainer.train()
    return [solver, solver(problem.spatial_domain.sample(8, "grid")).tensor]


@client("lightning-uq-box", "lightning", "the Trainer")
def lightning_uq_box(strategy: str) -> Any:
    """Dropout as uncertainty, and SWAG, which steps by hand and loads sampled weights in ``predict_step``."""
    import lightning as L
    import torch
    from lightning_uq_box.models import MLP
    from lightning_uq_box.uq_methods import MCDropoutRegression, SWAGRegression

    x = torch.linspace(0, 1, 32)[:, None]
    rows = [{"input": one, "target": one.sin()} for one in x]
    train = torch.utils.data.DataLoader(rows, batch_size=8)
    predicted = torch.utils.data.DataLoader(x, batch_size=8)
    net = MLP(dropout_p=0.1, n_hidden=[16, 16, 16], n_outputs=1)
    results = []
    for method in (
        MCDropoutRegression(net, num_mc_samples=4, loss_fn=torch.nn.MSELoss()),
        SWAGRegression(net, 3, 2, 4, 0.01, torch.nn.MSELoss()),
    ):
        trainer = L.Trainer(**QUIET, strategy=strategy, max_epochs=3)
        trainer.fit(method, train)
        results += [trainer.predict(method, predicted), method]
    return results


@client("scvi-tools", "lightning", "`model.train(strategy='superpipeline')`")
def scvi_tools(strategy: str) -> Any:
    """A variational autoencoder over single cells, with its latent representation and posterior samples."""
    import anndata
    import scvi

    scvi.settings.seed = 0  # it keeps one of its own
    counts = numpy.random.default_rng(0).poisson(2.0, size=(96, 20)).astype("float32")
    cells = anndata.AnnData(counts, obs={"batch": ["a", "b"] * 48})
    scvi.model.SCVI.setup_anndata(cells, batch_key="batch")
    model = scvi.model.SCVI(cells, n_hidden=16, n_latent=4, n_layers=3)
    model.train(max_epochs=3, batch_size=32, accelerator="cpu", strategy=strategy, enable_progress_bar=False)
    return [model.module, model.get_latent_representation(), model.get_elbo()]
