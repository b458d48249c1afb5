"""Inside LEO's adaptation: the codes of one task, and what each step does to many."""

# %% A task: five classes that the model has never seen, one image of each
import dataclasses

import jax
import jax.numpy as jnp

from metaleo import LEO, Episodes, load_data, load_model

leo = load_model("miniimagenet-leo").learner
assert isinstance(leo, LEO)
tasks = Episodes.over(load_data("sample").subset("test"), way=5, shot=1, query=15)
task = tasks.sample(jax.random.key(0))

# %% The adaptation with its trace
trace = leo.adapt(task.support).trace
dim, latent, size = task.support.inputs.shape[1], trace.code.shape[1], trace.decoded_weights.shape[1]
print(f"{dim} numbers per image → codes of {latent} numbers → {size} weights per class")


# %% The codes: how far apart the classes are before and after the latent steps
def apart(codes):
    """Mean distance between the codes of two classes."""
    return float(jnp.linalg.norm(codes[:, None] - codes[None, :], axis=-1).sum() / (len(codes) * (len(codes) - 1)))


moved = jnp.linalg.norm(trace.adapted_code - trace.code, axis=1)
print(f"scale of the encoder's Gaussians: {float(trace.code_distribution.scale.mean()):.3f} on average")
print(
    f"codes of two classes are {apart(trace.code):.2f} apart before, {apart(trace.adapted_code):.2f} after adaptation"
)
print(f"each code moved by {', '.join(f'{float(one):.2f}' for one in moved)}")

# %% The loss on the support set before each latent and each fine-tuning step, and at the end
print("support loss, step by step:", " ".join(f"{float(loss):.2f}" for loss in trace.support_losses))

# %% The decoder: how much longer is a step in weights than the step in codes it comes from?
stretch = jnp.linalg.norm(trace.decoded_weights - leo.decode(trace.code, None), axis=1) / moved
print(f"a step of length 1 in a code is one of length {float(stretch.mean()):.2f} in its {size} weights")
print(
    f"learned step sizes for codes: {float(leo.latent_step_size.min()):.2f} to {float(leo.latent_step_size.max()):.2f}"
)


# %% What it is good for: the same model with fewer steps, on the same 200 tasks
@jax.jit
def solve(learner, keys):
    def one(key):
        task = tasks.sample(key)
        logits = jax.vmap(learner.adapt(task.support).head)(task.query.inputs)
        loss = -jnp.sum(task.query.targets * jax.nn.log_softmax(logits), axis=1)
        return loss.mean(), jnp.mean(logits.argmax(1) == task.query.targets.argmax(1))

    return jax.tree.map(jnp.mean, jax.lax.map(one, keys, batch_size=50))


print("\nmean over 200 tasks, means in place of samples:")
print(f"{'after':>20}{'query loss':>12}{'right':>9}")
for latent_steps, finetune_steps in [(0, 0), (1, 0), (3, 0), (5, 0), (5, 5)]:
    learner = dataclasses.replace(leo, latent_steps=latent_steps, finetune_steps=finetune_steps)
    loss, right = solve(learner, jax.random.split(jax.random.key(1), 200))
    name = f"{latent_steps} latent steps" if not finetune_steps else f"{finetune_steps} fine-tuning steps"
    print(f"{name:>20}{float(loss):12.3f}{100 * float(right):7.1f} %")
