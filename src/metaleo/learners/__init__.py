"""One file per algorithm, one contract."""

from metaleo.learners.learner import Adaptation as Adaptation
from metaleo.learners.learner import Hyper as Hyper
from metaleo.learners.learner import Learner as Learner
from metaleo.learners.leo import LEO as LEO
from metaleo.learners.maml import MAML as MAML
from metaleo.learners.maml import MetaSGD as MetaSGD
from metaleo.learners.metric import NearestCentroid as NearestCentroid
