"""Read feature files and tables into a `MetaSet`, feature vectors by class, as NumPy arrays."""

from metaleo.data.feature_files import BUILTIN as BUILTIN
from metaleo.data.feature_files import load_data as load_data
from metaleo.data.feature_files import save_data as save_data
from metaleo.data.metaset import MetaSet as MetaSet
