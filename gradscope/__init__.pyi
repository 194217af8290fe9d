"""What is at the door: a file is loaded when one of its names is first used."""

__version__: str

from . import (
    diagnosis as diagnosis,
    gradients as gradients,
    intervals as intervals,
    objective as objective,
    plots as plots,
    policy as policy,
    rollouts as rollouts,
    sampling as sampling,
    tasks as tasks,
    theory as theory,
    trainer as trainer,
    updates as updates,
)
from .diagnosis import (
    diagnose as diagnose,
    findings as findings,
    make_report as make_report,
    viewer as viewer,
    write_report as write_report,
)
from .errors import InputError as InputError, SelfCheckError as SelfCheckError
from .gradients import (
    Resources as Resources,
    TokenJacobian as TokenJacobian,
    capture_activations as capture_activations,
    capture_gradients as capture_gradients,
    interval_gradients as interval_gradients,
    measure as measure,
)
from .policy import (
    Policy as Policy,
    checkpoint_step as checkpoint_step,
    load_policy as load_policy,
    read_adamw_state as read_adamw_state,
    whole_weights as whole_weights,
)
from .rollouts import TokenBatch as TokenBatch, read_dump as read_dump, read_rollouts as read_rollouts
from .sampling import sample as sample
from .trainer import train as train
from .updates import (
    ComparisonSettings as ComparisonSettings,
    StepSettings as StepSettings,
    apply_update as apply_update,
    apply_updates as apply_updates,
    compare as compare,
    movement_table as movement_table,
)
