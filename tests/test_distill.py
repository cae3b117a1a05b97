"""Distillation: the loss is its textbook formula, and the teacher stays as it is."""

import pytest
import torch
from reference import distillation_loss as slow_loss
from torch import nn

from compressnas.distill import distillation, distillation_loss


@pytest.mark.parametrize("weight", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("temperature", [0.5, 1.0, 4.0])
def test_the_loss_is_its_definition(weight: float, temperature: float) -> None:
    generator = torch.Generator().manual_seed(0)
    student, teacher = torch.randn(2, 7, 5, generator=generator, dtype=torch.float64) * 3
    labels = torch.randint(5, (7,), generator=generator)
    expected = slow_loss(student.tolist(), teacher.tolist(), labels.tolist(), weight, temperature)
    found = distillation_loss(student, teacher, labels, weight, temperature)
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64), rtol=1e-12, atol=1e-12)


def test_the_teacher_is_used_as_it_was() -> None:
    """In eval mode, without gradients, and whatever becomes of the network it was made from."""
    torch.manual_seed(0)
    network = nn.Sequential(nn.Flatten(), nn.Dropout(0.5), nn.Linear(4, 3)).train()
    images, labels = torch.randn(6, 1, 2, 2), torch.zeros(6, dtype=torch.int64)
    with torch.no_grad():
        targets = network.eval()(images)
    network.train()
    loss_fn = distillation(network, 0.5, 2.0)
    with torch.no_grad():
        network[2].weight.zero_()
    logits = torch.zeros(6, 3, requires_grad=True)
    loss = loss_fn(images, logits, labels)
    loss.backward()
    torch.testing.assert_close(loss, distillation_loss(logits, targets, labels, 0.5, 2.0))
    assert network.training and logits.grad is not None and network[2].weight.grad is None


def test_a_student_comes_to_agree_with_its_teacher() -> None:
    """With weight 1 the labels do not count: they are wrong here."""
    torch.manual_seed(0)
    teacher, student = nn.Linear(4, 3), nn.Linear(4, 3)
    images, labels = torch.randn(64, 4), torch.zeros(64, dtype=torch.int64)
    loss_fn = distillation(teacher, 1.0, 2.0)
    optimizer = torch.optim.SGD(student.parameters(), 1.0)
    for _ in range(300):
        optimizer.zero_grad()
        loss_fn(images, student(images), labels).backward()
        optimizer.step()
    assert torch.equal(student(images).argmax(1), teacher(images).argmax(1))
