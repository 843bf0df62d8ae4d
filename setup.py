"""What the package is called, contains and needs; settings of tools are in pyproject.toml."""

import os
import re

from setuptools import setup

HERE = os.path.dirname(os.path.abspath(__file__))


def read(*names):
    with open(os.path.join(HERE, *names), encoding="utf-8") as file:
        return file.read()


# Importing the package would make building it depend on what it imports.
VERSION = re.search(r'^__version__\b.*"(.+)"', read("infinibatch", "__init__.py"), re.MULTILINE).group(1)

setup(
    name="infinibatch",
    version=VERSION,
    description="Checkpointable iterators for randomised reading of data sets larger than memory",
    long_description=read("README.md"),
    long_description_content_type="text/markdown",
    author="the Infinibatch contributors",
    license="MIT",
    packages=["infinibatch"],
    package_data={"infinibatch": ["py.typed"]},
    zip_safe=False,
    python_requires=">=3.6",
    extras_require={
        # Bounds for Python 3.6: its pip takes the newest release even where that no longer runs on 3.6.
        "test": [
            'aiohttp; python_version >= "3.9"',
            'fsspec; python_version >= "3.8"',
            'numpy; python_version >= "3.7"',
            'pyarrow; python_version >= "3.9"',
            'webdataset; python_version >= "3.10"',
            'numpy < 1.20; python_version < "3.7"',
            'tqdm; python_version >= "3.7"',
            'tqdm < 4.63; python_version < "3.7"',
            'zstandard; python_version >= "3.7" and python_version < "3.14"',
            'zstandard < 0.20; python_version < "3.7"',
        ],
        "docs": ["pdoc3"],
        "torch": ["torch", "torchdata", "lightning", "accelerate"],
    },
    classifiers=[
        "Development Status :: 4 - Beta",
        "Intended Audience :: Developers",
        "Intended Audience :: Science/Research",
        "Operating System :: OS Independent",
        "Programming Language :: Python :: 3",
    ]
    + ["Programming Language :: Python :: 3.{}".format(minor) for minor in range(6, 14)]
    + [
        "Programming Language :: Python :: 3 :: Only",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Topic :: Software Development :: Libraries :: Python Modules",
        "Typing :: Typed",
    ],
)
