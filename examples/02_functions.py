"""A distribution over functions from a few points: LEORegressor, and a figure."""

# %% Points of two unknown functions, each a sine or a line, seen with noise
import numpy as np
from matplotlib.figure import Figure

from metaleo import LEORegressor

PROBLEMS = {
    "points of a sine": [(-4.0, 1.1), (-1.5, -2.0), (0.5, -0.2), (2.0, 1.7), (4.5, -2.2)],
    "a line or a sine": [(-2.2, 0.4), (-0.3, 0.1), (-0.2, -0.4), (0.7, -0.7), (1.6, -1.0)],
}

# %% `fit` samples a hundred codes, adapts each by gradient steps, and decodes each to a network
x = np.linspace(-5, 5, 101)
figure = Figure(figsize=(9, 3.5), layout="constrained")
for axes, (title, points) in zip(figure.subplots(1, 2), PROBLEMS.items(), strict=True):
    known, values = np.array(points).T
    regressor = LEORegressor(n_functions=100, random_state=0).fit(known[:, None], values)
    mean, std = regressor.predict(x[:, None], return_std=True)

    # Where there are points the functions agree; elsewhere they spread
    distance = np.abs(x[:, None] - known).min(1)
    near, far = std[distance < 0.3].mean(), std[distance == distance.max()].mean()
    print(f"{title}: the functions differ by {near:.2f} near the points, by {far:.2f} where they are farthest")

    low, high = np.quantile(regressor.sample_y([[5.0]], n_samples=100)[0], [0.1, 0.9])
    print(f"  at x = 5, eight of ten lie between {low:.1f} and {high:.1f}")

    axes.plot(x, regressor.sample_y(x[:, None], n_samples=25), color="tab:blue", alpha=0.25, linewidth=1)
    axes.plot(x, mean, color="black", linewidth=1.5)
    axes.plot(known, values, "o", color="tab:red")
    axes.set(title=title, xlabel="x", ylim=(-3, 3))

# %% The figure
figure.savefig("functions.png", dpi=120)
print("functions.png: sampled functions blue, their mean black, points red")
