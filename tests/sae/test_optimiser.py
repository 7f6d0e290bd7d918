"""Our Adam is torch's, to the bit, and does not bring torch's compiler into a training process."""

import subprocess
import sys

import torch

from dmsae.sae.config import SAEConfig
from dmsae.sae.optimiser import Adam
from dmsae.sae.sae import SAE


def test_it_is_the_fused_adam_of_torch() -> None:
    config, seeds = SAEConfig(8, 24, 4, (8, 24)), torch.Generator().manual_seed(0)
    ours = SAE.init(config, seeds)
    theirs = SAE(config)
    theirs.load_state_dict(ours.state_dict())
    optimiser, reference = (
        Adam(ours, 1e-2, (0.8, 0.99)),
        torch.optim.Adam(theirs.parameters(), 1e-2, (0.8, 0.99), fused=True),
    )
    for step, scale in enumerate((None, torch.tensor(3.7), None)):
        for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
            one.grad = torch.randn(one.shape, generator=seeds)
            other.grad = one.grad.clone()
        optimiser.lr = reference.param_groups[0]["lr"] = 1e-2 / (1 + step)
        optimiser.step(scale)
        reference.grad_scale = scale  # type: ignore[attr-defined]
        reference.step()
    for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(one, other)
        state = reference.state[other]
        assert optimiser.state[one].keys() == state.keys()
        assert all(torch.equal(value, state[name]) for name, value in optimiser.state[one].items())


def test_a_parameter_without_a_gradient_stays() -> None:
    sae = SAE.init(SAEConfig(8, 24, 4, (8, 24)), torch.Generator().manual_seed(0))
    before = sae.W_dec.detach().clone()
    sae.b_dec.grad = torch.ones(8)
    optimiser = Adam(sae, 1e-2)
    optimiser.step()
    assert torch.equal(sae.W_dec, before)
    assert list(optimiser.state) == [sae.b_dec]


def test_training_does_not_load_the_compiler() -> None:
    code = (
        "import sys, tempfile, torch, dmsae\n"
        "config = dmsae.TrainConfig(tokens=256, batch_size=64, norm_batches=1, device='cpu')\n"
        "with tempfile.TemporaryDirectory() as run:\n"
        "    dmsae.train(dmsae.SAEConfig(8, 32, 4, (8, 32)), torch.rand(256, 8), run, config)\n"
        "print('torch._dynamo' in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "False"
