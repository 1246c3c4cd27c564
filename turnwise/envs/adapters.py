"""as_env: adapts any supported object to the protocol that rollouts use."""

from turnwise.config.schema import EnvConfig
from turnwise.envs.any_object import ObjectEnv, looks_like_env
from turnwise.envs.base import BaseEnv, Env, EnvError
from turnwise.envs.message_turns import MessageTurns
from turnwise.envs.messages import MultiTurnEnv
from turnwise.envs.text_turns import TextTurns


def as_env(obj: object, *, config: EnvConfig, name: str) -> Env:
    """The object as an Env: a BaseEnv, a message-style environment, or any object with `reset` and
    `step`.

    Example:
        >>> from turnwise.envs.games.bandit import Bandit
        >>> env = as_env(Bandit(), config=EnvConfig(), name="bandit")
        >>> [message.role for message in env.reset(env.make_task(0, "train")).messages]
        ['system', 'user']
    """
    if isinstance(obj, MultiTurnEnv):
        return MessageTurns(obj, config=config, name=name)
    if isinstance(obj, BaseEnv):
        return TextTurns(obj, config=config, name=name)
    if isinstance(obj, Env):
        return obj
    if looks_like_env(obj):
        return TextTurns(ObjectEnv(obj, name=name), config=config, name=name)
    raise EnvError(
        f"{name}: {type(obj).__name__} is not an environment; it needs reset and step (see "
        "BaseEnv), or must be a SingleTurnEnv, MultiTurnEnv or ToolEnv"
    )
