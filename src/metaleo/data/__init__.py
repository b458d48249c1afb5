"""Feature files and tables, read into a MetaSet: vectors by class. NumPy only."""

from metaleo.data.feature_files import BUILTIN as BUILTIN
from metaleo.data.feature_files import load_data as load_data
from metaleo.data.feature_files import save_data as save_data
from metaleo.data.metaset import MetaSet as MetaSet
