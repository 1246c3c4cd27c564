"""Ways out of the Python tool's sandbox. Each is a program that prints ESCAPED where it gets out.

`HOST` stands for what the test has prepared outside: paths, names, ports and a process. Those named
in WORKS_OUTSIDE succeed without a sandbox, which shows that they are tried rightly.
"""

PREPARE = """
import ctypes, errno, os, signal, socket, struct, subprocess, sys, time
libc = ctypes.CDLL(None, use_errno=True)
def syscall(*args):
    result = libc.syscall(*[ctypes.c_long(a) if isinstance(a, int) else a for a in args])
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result
X86 = os.uname().machine == "x86_64"
def number(x86, arm):
    return x86 if X86 else arm
"""

ESCAPES = {
    # Sockets of other programs
    "unix stream": "s = socket.socket(socket.AF_UNIX); s.connect(HOST['stream']); s.send(b'x')",
    "unix datagram": """
s = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM); s.sendto(b'x', HOST['datagram'])""",
    "unix abstract stream": "socket.socket(socket.AF_UNIX).connect(HOST['abstract'])",
    "unix abstract datagram": """
s = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM); s.sendto(b'x', HOST['abstract datagram'])""",
    "unix in the other temporary folder": """
s = socket.socket(socket.AF_UNIX); s.connect(HOST['var stream']); s.send(b'x')""",
    "unix by a link": """
os.symlink(HOST['stream'], 'link.sock'); socket.socket(socket.AF_UNIX).connect('link.sock')""",
    "unix by a relative path": """
os.chdir(os.path.dirname(HOST['stream'])); socket.socket(socket.AF_UNIX).connect('stream')""",
    "unix by the root of process 1": """
socket.socket(socket.AF_UNIX).connect('/proc/1/root' + HOST['stream'])""",
    "a pair turned to another": """
a, _ = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM); a.sendto(b'x', HOST['datagram'])""",
    "a stream pair turned to another": """
a, _ = socket.socketpair(); a.connect(HOST['stream'])""",
    "a pair of packets turned to another": """
a, _ = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET); a.connect(HOST['stream'])""",
    "unix by io_uring": """
fd = syscall(425, 4, ctypes.create_string_buffer(256)); assert fd >= 0""",
    "unix by the 32-bit door": """
assert X86
import mmap
code = bytes.fromhex('53b867010000bb01000000b90100000031d2cd805bc3')
page = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
page.write(code)
call = ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(page)))
fd = call(); assert fd >= 0, fd
socket.socket(fileno=fd).connect(HOST['stream'])""",
    "unix by the x32 door": "assert X86; syscall(0x40000000 | 41, 1, 1, 0)",
    # Networks
    "tcp on the loopback": "socket.create_connection(('127.0.0.1', HOST['tcp']), 3)",
    "tcp over IPv6": "socket.create_connection(('::1', HOST['tcp6']), 3)",
    "udp": "s = socket.socket(type=socket.SOCK_DGRAM); s.sendto(b'x', ('127.0.0.1', HOST['udp']))",
    "vsock": "socket.socket(socket.AF_VSOCK)",
    "netlink": "socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0)",
    "raw packets": "socket.socket(socket.AF_PACKET, socket.SOCK_RAW)",
    "kernel crypto": "socket.socket(socket.AF_ALG, socket.SOCK_SEQPACKET)",
    # Pipes and files
    "fifo": "os.write(os.open(HOST['fifo'], os.O_WRONLY | os.O_NONBLOCK), b'x')",
    "fifo in the other temporary folder": """
os.write(os.open(HOST['var fifo'], os.O_WRONLY | os.O_NONBLOCK), b'x')""",
    "fifo by a link": """
os.symlink(HOST['fifo'], 'link'); os.write(os.open('link', os.O_WRONLY | os.O_NONBLOCK), b'x')""",
    "fifo read": "os.open(HOST['fifo'], os.O_RDONLY | os.O_NONBLOCK)",
    "write a file": "open(HOST['folder'] + '/written', 'w').write('x')",
    "write in the other temporary folder": "open(HOST['var folder'] + '/written', 'w').write('x')",
    "write shared memory": "open('/dev/shm/turnwise-escape', 'w').write('x')",
    "write to shared memory of others": "open(HOST['shm'], 'r+').write('x')",
    "append to a file": "open(HOST['file'], 'a').write('x')",
    "rename out": "open('mine', 'w').close(); os.rename('mine', HOST['folder'] + '/renamed')",
    "write beyond the working directory": "open('../../written', 'w').write('x')",
    "write by the root of process 1": "open('/proc/1/root' + HOST['file'], 'a').write('x')",
    "write into the system": "open('/etc/turnwise-escape', 'w').write('x')",
    "read a file of others": "assert open(HOST['file']).read().startswith('secret')",
    "read the project": "assert open(HOST['project']).read()",
    "list a temporary folder": "assert os.listdir(HOST['folder'])",
    "inherited descriptors": """
import fcntl
for fd in range(3, 256):
    try: path = os.readlink(f'/proc/self/fd/{fd}')
    except OSError: continue
    if path == HOST['file']: break
else:
    raise OSError('none')""",
    "a file by its handle": """
handle = ctypes.create_string_buffer(struct.pack('Ii', 8, 1) + bytes(64))
try: syscall(number(304, 265), os.open('/', os.O_RDONLY), handle, 0)
except OSError as error:
    if error.errno in (errno.EPERM, errno.ENOSYS): raise""",
    "devices": """
for name in ('mem', 'kmsg', 'kvm', 'tty', 'vda', 'sda', 'nvme0n1', 'fuse', 'net/tun', 'ptmx'):
    try: os.open('/dev/' + name, os.O_RDWR)
    except OSError: continue
    break
else:
    raise OSError('none')""",
    "a device made": "os.mknod('disk', 0o60666, os.makedev(254, 0)); os.open('disk', os.O_RDONLY)",
    # Processes
    "signal": "os.kill(HOST['pid'], 0)",
    "another's environment": "assert open(f\"/proc/{HOST['pid']}/environ\", 'rb').read()",
    "another's root": "assert os.listdir(f\"/proc/{HOST['pid']}/root\" + HOST['folder'])",
    "ptrace": "syscall(number(101, 117), 16, HOST['pid'], 0, 0)",
    "another's memory": """
buffer = ctypes.create_string_buffer(16)
iov = struct.pack('PN', ctypes.addressof(buffer), 16)
try: syscall(number(310, 270), HOST['pid'], iov, 1, iov, 1, 0)
except OSError as error:
    if error.errno != errno.EFAULT: raise  # nothing is at that address, and it was looked up""",
    "another's descriptors": "syscall(438, syscall(434, HOST['pid'], 0), 1, 0)",
    "shared memory of System V": "assert syscall(number(29, 194), HOST['sysv'], 0, 0) >= 0",
    "keys of the user": "syscall(number(248, 217), b'user', b'turnwise-escape', b'x', 1, -4)",
    # New rights
    "a user namespace": "syscall(number(272, 97), 0x10000000)",
    "a user namespace by clone": """
pid = syscall(number(56, 220), 0x10000000 | signal.SIGCHLD, 0, 0, 0, 0)
os._exit(0) if pid == 0 else os.waitpid(pid, 0)""",
    "a user namespace by clone3": """
args = ctypes.create_string_buffer(struct.pack('8Q', 0x10000000, 0, 0, 0, signal.SIGCHLD, 0, 0, 0))
pid = syscall(435, args, 64)
os._exit(0) if pid == 0 else os.waitpid(pid, 0)""",
    "the first namespace of mounts": "syscall(number(308, 268), os.open('/proc/1/ns/mnt', 0), 0)",
    "root writable again": "syscall(number(165, 40), b'none', b'/', 0, 32 | 4096, 0)",
    "unmount": "syscall(number(166, 39), b'/usr', 2)",
    "change of root": "os.chroot('.')",
    "become root": "os.setuid(0) if os.getuid() else os.open('/etc/shadow', os.O_RDWR)",
    "a setuid program": """
import shutil
shutil.copy(sys.executable, 'python'); os.chown('python', 0, 0); os.chmod('python', 0o4755)
assert subprocess.run(['./python', '-c', 'import os; assert os.geteuid() == 0']).returncode == 0""",
    "core pattern": "os.open('/proc/sys/kernel/core_pattern', os.O_WRONLY)",
    "control groups": """
os.listdir('/sys/fs/cgroup'); os.mkdir('/sys/fs/cgroup/turnwise-escape')""",
    "bpf": "syscall(number(321, 280), 0, ctypes.create_string_buffer(128), 128)",
    # Memory that counts towards no process's limit
    "memory of System V": "assert syscall(number(29, 194), 0, 1 << 30, 0o1600) >= 0",
    "semaphores of System V": "assert syscall(number(64, 190), 0, 32000, 0o1600) >= 0",
    "messages of System V": "assert syscall(number(68, 186), 0, 0o1600) >= 0",
    "a file without a folder": "os.write(os.memfd_create('x'), b'x')",
    "limits raised": """
import resource
resource.setrlimit(resource.RLIMIT_NPROC, (100000, 100000))""",
}
"""By name. A program that raises or prints nothing did not get out."""

WORKS_OUTSIDE = (
    "unix stream", "unix datagram", "unix abstract stream", "unix abstract datagram",
    "unix in the other temporary folder", "unix by a link", "unix by a relative path",
    "a pair turned to another", "tcp on the loopback", "udp", "netlink", "fifo",
    "fifo in the other temporary folder", "fifo by a link", "fifo read", "write a file",
    "write in the other temporary folder", "write to shared memory of others", "append to a file",
    "rename out", "read a file of others", "list a temporary folder", "signal",
    "another's environment", "another's root", "another's memory", "shared memory of System V",
)  # fmt: skip

LOOP = """
for name, code in ESCAPES.items():
    pid = os.fork()
    if pid == 0:
        signal.alarm(20)
        verdict = "ESCAPED"
        os.makedirs(name.replace("/", " "), exist_ok=True)
        os.chdir(name.replace("/", " "))
        try:
            exec(code, dict(globals()))
        except BaseException as error:
            verdict = f"held: {type(error).__name__} {error}"
        print(f"{name}\\t{verdict}".replace("\\n", " "), flush=True)
        os._exit(0)
    os.waitpid(pid, 0)
"""


def program(host: dict[str, object], names: tuple[str, ...] = tuple(ESCAPES)) -> str:
    """Tries every escape in a process of its own; prints a line for each."""
    chosen = {name: ESCAPES[name] for name in names}
    return f"{PREPARE}\nHOST = {host!r}\nESCAPES = {chosen!r}\n{LOOP}"
