"""Meta-learning algorithms, one per module or family, behind the interface `Learner`."""

from metaleo.learners.base import Adaptation as Adaptation
from metaleo.learners.base import HyperParams as HyperParams
from metaleo.learners.base import Learner as Learner
from metaleo.learners.joint import Joint as Joint
from metaleo.learners.leo import LEO as LEO
from metaleo.learners.linear import LogisticRegression as LogisticRegression
from metaleo.learners.linear import RidgeRegression as RidgeRegression
from metaleo.learners.maml import MAML as MAML
from metaleo.learners.maml import MetaSGD as MetaSGD
from metaleo.learners.maml import ProtoMAML as ProtoMAML
from metaleo.learners.maml import Reptile as Reptile
from metaleo.learners.metric import CL2N as CL2N
from metaleo.learners.metric import FEAT as FEAT
from metaleo.learners.metric import MatchingNet as MatchingNet
from metaleo.learners.metric import NearestCentroid as NearestCentroid
from metaleo.learners.metric import PrototypicalNet as PrototypicalNet
from metaleo.learners.metric import RelationNetLearner as RelationNetLearner
from metaleo.learners.quadratic import MetaQDA as MetaQDA
