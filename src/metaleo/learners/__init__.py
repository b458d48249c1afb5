"""One file per algorithm, one contract."""

from metaleo.learners.joint import Joint as Joint
from metaleo.learners.learner import Adaptation as Adaptation
from metaleo.learners.learner import Hyper as Hyper
from metaleo.learners.learner import Learner as Learner
from metaleo.learners.leo import LEO as LEO
from metaleo.learners.maml import MAML as MAML
from metaleo.learners.maml import MetaSGD as MetaSGD
from metaleo.learners.maml import Reptile as Reptile
from metaleo.learners.metric import CL2N as CL2N
from metaleo.learners.metric import MatchingNet as MatchingNet
from metaleo.learners.metric import NearestCentroid as NearestCentroid
from metaleo.learners.metric import PrototypicalNet as PrototypicalNet
from metaleo.learners.metric import RelationNetwork as RelationNetwork
from metaleo.learners.regression import LogisticRegression as LogisticRegression
from metaleo.learners.regression import RidgeRegression as RidgeRegression
