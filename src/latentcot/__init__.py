"""latentcot: pretrain language models that think before each token, as long as it needs."""

from latentcot.errors import UserError
from latentcot.models import METHODS, LatentLM, build_model, register_method

__version__ = "0.1.0"
__all__ = ["METHODS", "LatentLM", "UserError", "__version__", "build_model", "register_method"]
