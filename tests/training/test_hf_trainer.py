"""HF's Trainer and our loop train alike: same data, same losses, 20 updates in float64."""

import pytest
import torch
from transformers import Trainer, TrainerCallback, TrainingArguments

import latentcot
from latentcot.training.loop import Run, seed_everything
from latentcot.training.optimization import build_optimizer
from latentcot.training.recipe import make_recipe
from training.helpers import tiny

STEPS, ROWS, LENGTH = 20, 4, 16


class Rows(torch.utils.data.Dataset):
    """Sequences without a label on their first token: nobody predicts it, the Trainer counts it."""

    def __init__(self, ids):
        self.ids = ids

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, place):
        labels = self.ids[place].clone()
        labels[0] = -100
        return {"input_ids": self.ids[place], "labels": labels}


class Seeds(TrainerCallback):
    """The randomness of an update, as our loop has it."""

    def __init__(self, run):
        self.run = run

    def on_step_begin(self, args, state, control, **kwargs):
        seed_everything(self.run.recipe.seed, f"step {state.global_step}")
        self.run.model.draw()


@pytest.mark.parametrize("method", latentcot.METHODS)
def test_same_losses(method, source, tmp_path):
    content = tiny(
        source,
        method,
        precision="float64",
        budget_tokens=STEPS * ROWS * LENGTH,
        batch_size=ROWS,
        block_length=LENGTH,
        warmup_share=0.0,
        min_learning_rate_ratio=1.0,
    )
    recipe = make_recipe(content)
    run = Run(recipe, tmp_path / "run")
    start = {name: value.clone() for name, value in run.model.state_dict().items()}
    ours = [run.update()["loss"] for _ in range(STEPS)]
    run.metrics.close()

    run.model.load_state_dict(start)
    batches = [torch.from_numpy(run.blocks.batch(step, ROWS)) for step in range(STEPS)]
    arguments = TrainingArguments(
        output_dir=str(tmp_path / "trainer"),
        max_steps=STEPS,
        per_device_train_batch_size=ROWS // 2,
        gradient_accumulation_steps=2,
        lr_scheduler_type="constant",
        max_grad_norm=recipe.training.grad_clip,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        train_sampling_strategy="sequential",
        dataloader_pin_memory=False,
    )
    trainer = Trainer(
        model=run.model,
        args=arguments,
        train_dataset=Rows(torch.cat(batches)),
        optimizers=(build_optimizer(run.model, recipe.training), None),
    )
    trainer.add_callback(Seeds(run))
    trainer.train()
    theirs = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    assert len(theirs) == STEPS
    # The Trainer keeps its running loss in float32.
    torch.testing.assert_close(torch.tensor(theirs), torch.tensor(ours), rtol=2e-6, atol=0)
    assert abs(ours[-1] - ours[0]) > 0.1
